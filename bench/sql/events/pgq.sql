-- A batch is what lies between two ticks. The ticker runs in a session of its own in production, about once a second;
-- here after as many events as its batches are to have.
SELECT pgq.set_queue_config('orders', 'ticker_max_count', '1');

CREATE PROCEDURE emit_events(first integer, last integer, per_transaction integer, per_tick integer) LANGUAGE plpgsql AS $$
BEGIN
  FOR start IN first..last BY per_transaction LOOP
    PERFORM pgq.insert_event('orders', 'order.placed', event_payload(n)::text, 'event-' || n, 'customer-' || n % 10000, NULL, NULL)
       FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
    IF (start - first + per_transaction) % per_tick = 0 THEN
      PERFORM pgq.ticker('orders');
      COMMIT;
    END IF;
  END LOOP;
END
$$;

CREATE PROCEDURE drain_events(batch_size integer, INOUT drained bigint) LANGUAGE plpgsql AS $$
DECLARE
  batch bigint;
  events bigint;
BEGIN
  drained := 0;
  LOOP
    batch := pgq.next_batch('orders', 'relay');
    EXIT WHEN batch IS NULL;
    SELECT count(ev_data) INTO events FROM pgq.get_batch_events(batch);
    PERFORM pgq.finish_batch(batch);
    COMMIT;
    drained := drained + events;
  END LOOP;
END
$$;
