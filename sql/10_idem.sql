-- idem_begin, idem_try_begin, idem_complete, idem_peek, idem_forget: every outcome.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;

-- The first time: new. Then, in the same transaction and later: the saved answer, or a conflict.
BEGIN;
SELECT * FROM idem_peek('k', 'a');
SELECT * FROM idem_begin('k', 'a');
SELECT * FROM idem_peek('k', 'a');
SELECT idem_complete('k', '{"b": 1.50, "a": [null]}');
SELECT * FROM idem_begin('k', 'a');
SELECT * FROM idem_begin('k', 'b');
SELECT * FROM idem_peek('k', 'a');
COMMIT;
SELECT * FROM idem_begin('k', 'a');
SELECT * FROM idem_begin('k', 'b');
SELECT * FROM idem_try_begin('k', 'a');
SELECT * FROM idem_try_begin('k', 'b');
SELECT * FROM idem_peek('k', 'a');
SELECT * FROM idem_peek('k', 'b');
-- Who may read the view does not need the digest.
SELECT * FROM idem_peek('k');
SELECT * FROM idem_peek('k', null);
SELECT * FROM idem_peek('unknown');
SELECT key, scope, request_hash, status, response_json, created_at <= completed_at AS begun_first,
       expires_at - completed_at AS life FROM idempotency_records;

-- A scope is a name space of its own.
BEGIN;
SELECT outcome FROM idem_begin('k', 'b', 'tenant-7');
SELECT idem_complete('k', '7', 'tenant-7');
COMMIT;
SELECT * FROM idem_begin('k', 'b', 'tenant-7');
SELECT * FROM idem_begin('k', 'a');
SELECT outcome FROM idem_peek('tenant-7k', 'b');

-- The digest as text, as bytes, as an untyped literal, in hexadecimal.
BEGIN;
SELECT outcome FROM idem_begin('h', '\x616263');
SELECT idem_complete('h');
SELECT outcome FROM idem_begin('h', 'abc');
SELECT outcome FROM idem_begin('h', 'abc'::text);
SELECT outcome FROM idem_begin('h', 'abc'::varchar);
SELECT outcome FROM idem_begin('h', 'abc'::bytea);
SELECT outcome FROM idem_begin('h', '\x616263'::bytea);
SELECT outcome FROM idem_begin('h', E'\\x6162633d'::text);
SELECT outcome FROM idem_begin(key => 'h', request_hash => 'abc', scope => '', ttl => null, also_accept => null);
SELECT outcome FROM idem_try_begin('h', 'abc');
SELECT outcome FROM idem_try_begin('h', 'abc'::bytea);
SELECT outcome FROM idem_peek('h', 'abc'::bytea);
SELECT outcome FROM idem_peek(key => 'h', scope => '');
-- Digests by an older scheme that count as the same request
SELECT outcome FROM idem_begin('h', 'v2:abc');
SELECT outcome FROM idem_begin('h', 'v2:abc', also_accept => ARRAY['v1:abc', 'abc']);
SELECT outcome FROM idem_begin('h', 'v2:abc', also_accept => '{v1:abc,"\\x616263"}');
SELECT outcome FROM idem_begin('h', 'v2:abc'::bytea, also_accept => ARRAY['v1:abc', 'abc']::bytea[]);
SELECT outcome FROM idem_begin('h', 'v2:abc', also_accept => ARRAY['v1:abc']);
SELECT outcome FROM idem_begin('h', 'v2:abc', also_accept => '{}');
ROLLBACK;

-- Answers replay exactly; no answer is not JSON null.
BEGIN;
SELECT count(idem_begin('answer' || i, 'a')) FROM generate_series(1, 9) AS i;
SELECT idem_complete('answer1'), idem_complete('answer2', 'null'), idem_complete('answer3', '0'),
       idem_complete('answer4', 'false'), idem_complete('answer5', '""'), idem_complete('answer6', '[]'),
       idem_complete('answer7', '1.50'), idem_complete('answer8', '{}'), idem_complete('answer9', '"é😀"');
COMMIT;
SELECT i, response, response IS NULL AS none FROM generate_series(1, 9) AS i, idem_begin('answer' || i, 'a');
-- A failure of the business is an answer too.
BEGIN;
SELECT outcome FROM idem_begin('f', 'a');
SELECT idem_complete('f', '{"error": "no funds"}', status => 'failed');
COMMIT;
SELECT * FROM idem_begin('f', 'a');

-- Complete again: the same is nothing new.
BEGIN;
SELECT outcome FROM idem_begin('twice', 'a');
SELECT idem_complete('twice', '{"n": 1.5}');
SELECT idem_complete('twice', '{"n":1.5}');
COMMIT;

-- Life: expiry decides, and counts from completion.
BEGIN;
SELECT outcome FROM idem_begin('month', 'a', ttl => '1 month 2 days');
SELECT outcome FROM idem_begin('short', 'a', ttl => '1 microsecond');
SELECT idem_complete('month'), idem_complete('short', '1');
SELECT outcome FROM idem_begin('short', 'a');
COMMIT;
SELECT completed_at + interval '1 month 2 days' = expires_at AS counts_from_completion
  FROM idempotency_records WHERE key = 'month';
SELECT * FROM idem_peek('short', 'a');
BEGIN;
SELECT outcome FROM idem_begin('short', 'b');
SELECT idem_complete('short', '2');
COMMIT;
SELECT * FROM idem_begin('short', 'b');
SELECT count(*) FROM idempotency_records WHERE key = 'short';
SET retrysafe.idem_retention = '1h';
BEGIN;
SELECT outcome FROM idem_begin('hour', 'a');
SELECT idem_complete('hour');
COMMIT;
SELECT expires_at - completed_at AS life FROM idempotency_records WHERE key = 'hour';
RESET retrysafe.idem_retention;

-- Forget
SELECT idem_forget('k'), idem_forget('k'), idem_forget('k', 'tenant-7');
BEGIN;
SELECT outcome FROM idem_begin('k', 'other');
SELECT idem_complete('k');
SELECT idem_forget('k');
SELECT outcome FROM idem_begin('k', 'a');
SELECT idem_complete('k', '1');
COMMIT;
SELECT * FROM idem_begin('k', 'a');

-- A read-only transaction gets answers, and no key.
BEGIN READ ONLY;
SELECT * FROM idem_begin('k', 'a');
SELECT * FROM idem_try_begin('k', 'b');
SELECT * FROM idem_peek('k', 'a');
SELECT * FROM idem_peek('unknown', 'a');
\set VERBOSITY sqlstate
SAVEPOINT s;
SELECT * FROM idem_begin('unknown', 'a');
ROLLBACK TO s;
SELECT * FROM idem_try_begin('unknown', 'a');
ROLLBACK TO s;
SELECT idem_complete('unknown');
ROLLBACK;

-- idem_hash
SELECT idem_hash('{"a":1,"b":2}') = idem_hash(' {"b" : 2, "a" : 1}') AS same,
       idem_hash('9007199254740993') = idem_hash('9007199254740992') AS digits,
       idem_hash('"0.1"') = idem_hash('0.1') AS type, idem_hash('1.5') = idem_hash('1.50') AS scale,
       idem_hash('[1,2]') = idem_hash('[2,1]') AS arrays_have_an_order, idem_hash(null) IS NULL AS "null";
SELECT idem_hash('{"b": 2, "a": [1.50, null, "é"]}');
SELECT idem_hash(j) = sha256(convert_to(j::text, 'UTF8')) AS defined
  FROM (VALUES ('{"b": 2, "a": [1.50, null, "é"]}'::jsonb), ('""'), ('{}'), ('"\n\\\u20ac"')) AS v (j);

SELECT count(idem_forget(key, scope)) > 0 AS cleaned FROM idempotency_records;

-- A transaction that becomes read-only on its way.
BEGIN;
SELECT outcome FROM idem_begin('turned', 'h');
SET TRANSACTION READ ONLY;
SELECT idem_complete('turned', '1');
ROLLBACK;
