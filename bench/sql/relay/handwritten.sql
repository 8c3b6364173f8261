-- Claims a batch, hands it to the client, marks it: one statement, one round trip.
UPDATE @schema@.outbox o SET sent_at = clock_timestamp()
  FROM (SELECT c.id FROM @schema@.outbox c
         WHERE c.sent_at IS NULL ORDER BY c.id LIMIT @batch@ FOR UPDATE SKIP LOCKED) AS claimed
 WHERE o.id = claimed.id
RETURNING o.id, o.event_key, o.event_type, o.ordering_key, o.payload, o.created_at;
