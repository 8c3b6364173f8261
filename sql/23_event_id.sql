-- Event ids are computed from the log's UUID, the scope and the event key.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;

BEGIN;
DELETE FROM outbox_eras;
-- No identity yet.
SELECT outbox_event_id('e') IS NULL AS unknown;
INSERT INTO outbox_eras (era, log, first_id, system_identifier, database, extension, timeline)
VALUES (1, '3f1c2f34-5b0d-4c5e-9d57-1f3b2a6f8a10', 0, 1, 1, 1, 1);
SELECT outbox_event_id('order-1'), outbox_event_id('order-1', 'shop'), outbox_event_id(U&'\00FC\4E2D');
-- How anybody can compute it: version 8 and the variant replace six bits.
CREATE FUNCTION pg_temp.expected(log uuid, event_key text, scope text) RETURNS uuid LANGUAGE sql AS $$
  SELECT encode(set_byte(set_byte(d, 6, (get_byte(d, 6) & 15) | 128), 8, (get_byte(d, 8) & 63) | 128), 'hex')::uuid
    FROM substr(sha256(uuid_send(log) || convert_to(scope, 'UTF8') || '\x00' || convert_to(event_key, 'UTF8')), 1, 16) d
$$;
SELECT bool_and(outbox_event_id(k, s) = pg_temp.expected('3f1c2f34-5b0d-4c5e-9d57-1f3b2a6f8a10', k, s)) AS as_documented
  FROM unnest(ARRAY['e', U&'\00FC\4E2D', repeat('x', 255)]) k, unnest(ARRAY['', 's', U&'\00E9']) s;
-- Scope and key are joined unambiguously.
SELECT outbox_event_id('bc', 'a') = outbox_event_id('c', 'ab') AS same;
SELECT count(DISTINCT outbox_event_id('e' || i)) FROM generate_series(1, 10000) i;
-- A fork of the log has ids of its own.
INSERT INTO outbox_eras (era, log, first_id, system_identifier, database, extension, timeline)
VALUES (2, '5d0a7a52-8a0c-4b8e-8c39-0f5d6f1b7e21', 0, 1, 1, 1, 1);
SELECT outbox_event_id('order-1');
SELECT outbox_event_id(null) IS NULL AS unknown;
ROLLBACK;
