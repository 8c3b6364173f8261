-- outbox_emit: every error of bad input, each its own SQLSTATE; the transaction goes on after a savepoint.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY terse

CREATE FUNCTION pg_temp.try(call text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE 'SELECT ' || call;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  RETURN sqlstate || ': ' || sqlerrm;
END
$$;

BEGIN;
-- Event key, scope, key
SELECT pg_temp.try($$outbox_emit(null, null, 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, '', 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, repeat('x', 255), 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, repeat('x', 256), 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, repeat(U&'\00E9', 128), 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, repeat('x', 400000), 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', scope => null)$$);
SELECT pg_temp.try($$outbox_emit(null, 'e1', 't', '1', scope => repeat('s', 255))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', scope => repeat('s', 256))$$);
SELECT pg_temp.try($$outbox_emit('', 'e', 't', '1')$$);
SELECT pg_temp.try($$outbox_emit(repeat('k', 256), 'e', 't', '1')$$);
-- A key that this transaction has not begun
SELECT pg_temp.try($$outbox_emit('k', 'e', 't', '1')$$);
SELECT pg_temp.try($$outbox_emit('k', 'e', 't', '1', deliver_after => '2100-01-01')$$);
-- Event type
SELECT pg_temp.try($$outbox_emit(null, 'e', null, '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', '', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e2', repeat('t', 255), '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', repeat('t', 256), '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', E'a\r\nx-admin: 1', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', E'a\x7f', '1')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e3', U&'\00FCber', '1')$$);
-- Ordering key
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', '')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e4', 't', '1', repeat('o', 255))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', repeat('o', 256))$$);
-- Headers
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => 'null')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '"x"')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '[]')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e5', 't', '1', headers => '{}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": 1}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": null}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": {"b": "c"}}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": ["b"]}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"": "v"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a b": "v"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a:": "v"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a\r\nb": "v"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": "v\r\nx-admin: 1"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"a": "\u0001"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => '{"Tenant": "1", "tenant": "2"}')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e6', 't', '1', headers => jsonb_build_object(repeat('n', 64), U&'\00FCber'))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => jsonb_build_object(repeat('n', 65), 'v'))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e7', 't', '1', headers => (SELECT jsonb_object_agg('n' || i, 'v') FROM generate_series(1, 64) i))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => (SELECT jsonb_object_agg('n' || i, 'v') FROM generate_series(1, 65) i))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e8', 't', '1', headers => jsonb_build_object('n', repeat('v', 16383)))$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', headers => jsonb_build_object('n', repeat('v', 16384)))$$);
-- Payload: measured as JSON text
SET LOCAL retrysafe.max_payload_bytes = 10;
SELECT pg_temp.try($$outbox_emit(null, 'e9', 't', '"12345678"')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '"123456789"')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '"\u0001\u0001"')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1e100000')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '"\u0000"')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '"\ud83d"')$$);
-- and nested so far: containers count
SET LOCAL retrysafe.max_payload_bytes = '1MB';
SELECT pg_temp.try($$outbox_emit(null, 'nested', 't', (repeat('[', 500) || '1' || repeat(']', 500))::jsonb)$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', (repeat('[', 501) || repeat(']', 501))::jsonb)$$);
SELECT pg_temp.try($$outbox_emit(null, 'members', 't', (repeat('{"a": ', 500) || '1' || repeat('}', 500))::jsonb)$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', (repeat('{"a": ', 500) || '[]' || repeat('}', 500))::jsonb)$$);
SELECT pg_temp.try($$outbox_emit(null, 'wide', 't', ('[' || repeat('[[]], ', 1000) || '[]]')::jsonb)$$);
-- Delivery time
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', deliver_after => 'infinity')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e', 't', '1', deliver_after => '-infinity')$$);
SELECT pg_temp.try($$outbox_emit(null, 'e10', 't', '1', deliver_after => '2001-01-01')$$);
-- What was accepted is there, and nothing else.
SELECT array_agg(CASE WHEN length(event_key) > 9 THEN 'long' ELSE event_key END ORDER BY id) FROM outbox_log
 WHERE txid = pg_current_xact_id();
ROLLBACK;

-- As users see it, in full.
\set VERBOSITY default
\set SHOW_CONTEXT never
BEGIN;
SELECT outbox_emit(null, '', 't', '1');
ROLLBACK;
BEGIN;
SELECT outbox_emit(null, 'e', 't', '1', headers => '{"a": "v\r\nx-admin: 1"}');
ROLLBACK;

-- An emit writes: not in a read-only transaction.
\set VERBOSITY sqlstate
BEGIN READ ONLY;
SELECT outbox_emit(null, 'e', 't', '1');
ROLLBACK;
BEGIN READ ONLY;
SELECT outbox_cancel('e');
ROLLBACK;
