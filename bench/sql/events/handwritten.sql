CREATE PROCEDURE emit_events(first integer, last integer, per_transaction integer) LANGUAGE plpgsql AS $$
BEGIN
  FOR start IN first..last BY per_transaction LOOP
    INSERT INTO @schema@.outbox (event_key, event_type, ordering_key, payload)
    SELECT 'event-' || n, 'order.placed', 'customer-' || n % 10000, event_payload(n)
      FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
  END LOOP;
END
$$;

CREATE PROCEDURE drain_events(batch_size integer, INOUT drained bigint) LANGUAGE plpgsql AS $$
DECLARE
  ids bigint[];
  events bigint;
BEGIN
  drained := 0;
  LOOP
    SELECT array_agg(id), count(payload) INTO ids, events
      FROM (SELECT o.id, o.payload FROM @schema@.outbox o
             WHERE o.sent_at IS NULL ORDER BY o.id LIMIT batch_size FOR UPDATE SKIP LOCKED) AS claimed;
    EXIT WHEN events = 0;
    UPDATE @schema@.outbox SET sent_at = clock_timestamp() WHERE id = ANY (ids);
    COMMIT;
    drained := drained + events;
  END LOOP;
END
$$;
