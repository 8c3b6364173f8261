CREATE PROCEDURE emit_events(first integer, last integer, per_transaction integer, keys integer DEFAULT 10000) LANGUAGE plpgsql AS $$
BEGIN
  FOR start IN first..last BY per_transaction LOOP
    PERFORM retrysafe.outbox_emit(NULL, 'event-' || n, 'order.placed', event_payload(n), 'customer-' || n % keys)
       FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
  END LOOP;
END
$$;

-- A publisher over plain SQL.
CREATE PROCEDURE drain_events(batch_size integer, INOUT drained bigint) LANGUAGE plpgsql AS $$
DECLARE
  handle text;
  events bigint;
BEGIN
  drained := 0;
  LOOP
    SELECT min(batch), count(payload) INTO handle, events FROM retrysafe.outbox_fetch('relay', batch_size);
    COMMIT;
    EXIT WHEN events = 0;
    PERFORM retrysafe.outbox_ack(handle);
    COMMIT;
    drained := drained + events;
  END LOOP;
END
$$;

CREATE PROCEDURE emit_delayed(first integer, last integer, per_transaction integer) LANGUAGE plpgsql AS $$
BEGIN
  FOR start IN first..last BY per_transaction LOOP
    PERFORM retrysafe.outbox_emit(NULL, 'event-' || n, 'order.placed', event_payload(n), 'customer-' || n % 10000,
                                  deliver_after => now() + interval '1 day')
       FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
  END LOOP;
END
$$;
