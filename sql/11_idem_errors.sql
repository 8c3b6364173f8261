-- Idempotent writes: every error of its own, and the session goes on after ROLLBACK TO SAVEPOINT.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY terse
CREATE FUNCTION pg_temp.try(call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'SELECT (' || call || ')::text' INTO result;
  RETURN coalesce(result, 'null');
EXCEPTION WHEN OTHERS THEN
  RETURN sqlstate || ': ' || sqlerrm;
END
$$;
CREATE FUNCTION pg_temp.answer(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
BEGIN;
-- Keys and scopes
SELECT f AS "function", pg_temp.try(format(f, 'null', '''''')) AS "null", pg_temp.try(format(f, '''''', '''''')) AS empty,
       pg_temp.try(format(f, 'repeat(''k'', 256)', '''''')) AS long,
       pg_temp.try(format(f, 'repeat(''k'', 400000)', '''''')) AS huge
  FROM (VALUES ('idem_begin(%s, ''a'', %s)'), ('idem_try_begin(%s, ''a'', %s)'), ('idem_complete(%s, ''1'', %s)'),
               ('idem_run(%s, ''1'', ''pg_temp.answer(jsonb)'', %s)'), ('idem_peek(%s, ''a'', %s)'),
               ('idem_forget(%s, %s)')) AS v (f);
SELECT f AS "function", pg_temp.try(format(f, '''k''', 'null')) AS "null",
       pg_temp.try(format(f, '''k''', 'repeat(''k'', 256)')) AS long,
       pg_temp.try(format(f, '''k''', 'repeat(''k'', 400000)')) AS huge
  FROM (VALUES ('idem_begin(%s, ''a'', %s)'), ('idem_try_begin(%s, ''a'', %s)'), ('idem_complete(%s, ''1'', %s)'),
               ('idem_run(%s, ''1'', ''pg_temp.answer(jsonb)'', %s)'), ('idem_peek(%s, ''a'', %s)'),
               ('idem_forget(%s, %s)')) AS v (f);
-- Bytes count, not characters; the longest key in the longest scope fits.
SELECT pg_temp.try($$idem_begin(repeat('é', 128), 'a')$$);
SELECT pg_temp.try($$idem_begin(repeat('é', 127), 'a')$$);
SELECT pg_temp.try($$idem_begin(repeat('k', 255), 'a', repeat('s', 255))$$);
SELECT pg_temp.try($$idem_begin('k', 'a', '')$$);

-- Digests
SELECT d AS digest, pg_temp.try(format('idem_begin(''k'', %s)', d)) AS begin,
       pg_temp.try(format('idem_try_begin(''k'', %s)', d)) AS try_begin, pg_temp.try(format('idem_peek(''k'', %s)', d)) AS peek
  FROM (VALUES (''''''), ('''''::bytea'), ('repeat(''d'', 65)'), ('repeat(''é'', 33)'), ('repeat(''d'', 65)::bytea'),
               ('''\x''::text'), ('''\xabc''::text'), ('''\xzz''::text'), ('''\x 61''::text'),
               ('''\x'' || repeat(''00'', 65)'), ('repeat(''d'', 400000)')) AS v (d);
SELECT pg_temp.try($$idem_begin('k', null)$$), pg_temp.try($$idem_begin('k', null::bytea)$$);
SELECT pg_temp.try($$idem_begin('long digest', repeat('d', 64))$$),
       pg_temp.try($$idem_begin('long digest in hex', '\x' || repeat('00', 64))$$);
SELECT pg_temp.try($$idem_begin('k', 'a', also_accept => ARRAY['b', null])$$),
       pg_temp.try($$idem_begin('k', 'a', also_accept => ARRAY['b', ''])$$),
       pg_temp.try($$idem_begin('k', 'a', also_accept => ARRAY['\xg0'])$$),
       pg_temp.try($$idem_begin('k', 'a'::bytea, also_accept => ARRAY[repeat('d', 65)::bytea])$$);

-- ttl
SELECT t AS ttl, pg_temp.try(format('idem_begin(''k'', ''a'', ttl => %L)', t))
  FROM unnest(ARRAY['0', '-1 second', '-1 month', '1 month -1 day', '-1 day 25 hours', '1001 years', '400000 days',
                    '9000000 hours', '178000000 years']) AS t;
SELECT pg_temp.try($$idem_begin('thousand years', 'a', ttl => '1000 years')$$);

-- Owning
SELECT pg_temp.try($$idem_complete('nobody''s')$$);
SELECT outcome FROM idem_begin('own', 'a');
SELECT pg_temp.try($$idem_begin('own', 'a')$$), pg_temp.try($$idem_try_begin('own', 'b')$$);
SELECT pg_temp.try($$idem_complete('own', '1', 'another scope')$$);
SELECT pg_temp.try($$idem_complete('own', '1', status => null)$$), pg_temp.try($$idem_complete('own', '1', status => 'done')$$),
       pg_temp.try($$idem_complete('own', '1', status => '')$$);
SET LOCAL retrysafe.max_response_bytes = 10;
SELECT pg_temp.try($$idem_complete('own', '"123456789"')$$);
SELECT idem_complete('own', '"12345678"');
RESET retrysafe.max_response_bytes;
-- Two gigabytes of text from a hundred kilobytes: they are not written out to be counted.
SELECT pg_temp.try($$idem_complete('own', (SELECT jsonb_agg(1e131071) FROM generate_series(1, 16000)))$$);
SELECT pg_temp.try($$idem_complete('own', '"12345679"')$$), pg_temp.try($$idem_complete('own')$$),
       pg_temp.try($$idem_complete('own', '"12345678"', status => 'failed')$$);
SELECT idem_complete('own', '"12345678"');

-- Handlers
CREATE FUNCTION pg_temp.two(jsonb, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION pg_temp.text(text) RETURNS jsonb LANGUAGE sql AS 'SELECT $1::jsonb';
CREATE FUNCTION pg_temp.void(jsonb) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION pg_temp.many(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE AGGREGATE pg_temp.last(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
CREATE PROCEDURE pg_temp.proc(jsonb) LANGUAGE sql AS '';
SELECT h AS handler, replace(pg_temp.try(format('idem_run(''r'', ''1'', %L)', h)), pg_my_temp_schema()::regnamespace::text, 'pg_temp')
  FROM unnest(ARRAY['pg_temp.two(jsonb,jsonb)', 'pg_temp.text(text)', 'pg_temp.void(jsonb)', 'pg_temp.many(jsonb)',
                    'pg_temp.last(jsonb)', 'pg_temp.proc(jsonb)', '4294967295']) AS h;
SELECT pg_temp.try($$idem_run('r', '1', null)$$), pg_temp.try($$idem_run('r', null, 'pg_temp.answer(jsonb)')$$);
-- More than a kilobyte is told in full.
DO $$BEGIN EXECUTE format('CREATE FUNCTION pg_temp.long(%s) RETURNS void LANGUAGE sql AS ''''', repeat('int2vector,', 99) || 'json'); END$$;
SELECT regexp_replace(pg_temp.try(format('idem_run(''r'', ''1'', ''%s'')', oid)), '\w+\.long\((int2vector,){99}', '[begin]')
  FROM pg_proc WHERE proname = 'long' AND pronargs = 100;

-- Clean-up and inbox
SELECT pg_temp.try('idem_cleanup(null)'), pg_temp.try('idem_cleanup(0)'), pg_temp.try('idem_cleanup(-1)');
SELECT pg_temp.try($$inbox_accept(null, 'e')$$), pg_temp.try($$inbox_accept('', 'e')$$),
       pg_temp.try($$inbox_accept(repeat('c', 256), 'e')$$);
SELECT pg_temp.try($$inbox_accept('c', null::text)$$), pg_temp.try($$inbox_accept('c', '')$$),
       pg_temp.try($$inbox_accept('c', repeat('e', 400000))$$);
SELECT pg_temp.try($$inbox_accept('c', null::text[])$$), pg_temp.try($$inbox_accept('c', ARRAY['e', null])$$),
       pg_temp.try($$inbox_accept('c', ARRAY['e', ''])$$), pg_temp.try($$inbox_accept('c', ARRAY[repeat('e', 256)])$$),
       pg_temp.try($$inbox_accept(null, '{}'::text[])$$);
ROLLBACK;
\set VERBOSITY sqlstate
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_cleanup();
ROLLBACK;
BEGIN;
SELECT idem_cleanup(), outbox_cleanup();
ROLLBACK;
-- Nothing of all that is left.
SELECT count(*) FROM idempotency_records;
