-- Destinations: every function, every argument that can be wrong.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
RESET client_min_messages;
SET search_path = retrysafe, public;
-- Shows the SQLSTATE of an error, its text and its hint.
CREATE FUNCTION public.t40(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  message text;
  hint text;
BEGIN
  EXECUTE statement;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
  RETURN SQLSTATE || ': ' || message || coalesce(' | ' || nullif(regexp_replace(hint, 'Known options: .*', 'Known options: …'), ''), '');
END
$$;

-- Good ones

SELECT outbox_create_destination('t40.a-b_C', 'pull') > 0 AS made;
BEGIN;
SELECT outbox_create_destination('t40.hook', 'http', '{"url": "https://example.com/events", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
  "headers": {"Authorization": "Bearer secret-token"}, "timeout": "5s", "http2": false}', event_types => '{order.*,invoice.paid}',
  shards => 4, max_attempts => 3, backoff => '2 seconds', backoff_max => '1 hour', on_exhausted => 'block',
  batch_events => 10, batch_bytes => 65536, lease => '1 minute') > 0 AS made;
SELECT outbox_pause('t40.hook');  -- no worker is to work it
COMMIT;
SELECT kind, state, paused, backlog, delivered, parked_retry, parked_blocked, dead, failures, shards, event_types,
       options, max_attempts, backoff, backoff_max, on_exhausted, batch_events, batch_bytes, lease
  FROM outbox_status WHERE name = 't40.hook' \gx
SELECT public.t40($$SELECT outbox_create_destination('t40.hook', 'pull')$$);

-- Names
SELECT public.t40(format('SELECT outbox_create_destination(%L, ''pull'')', name))
  FROM unnest(ARRAY['', repeat('x', 64), 'ä', 'a b', 'a/b', 'a''b', NULL]) AS name;
SELECT public.t40(format('SELECT outbox_create_destination(%L, ''pull'')', repeat('x', 63)));
SELECT outbox_drop_destination(repeat('x', 63));

-- Kinds
SELECT regexp_replace(public.t40($$SELECT outbox_create_destination('t40', 'pigeon')$$),
                      'function, .*pull.*?([.])$', '...\1') AS t40;
SELECT public.t40($$SELECT outbox_create_destination('t40', NULL)$$);

-- Options
SELECT o, public.t40(format('SELECT outbox_create_destination(''t40'', ''http'', %L)', o))
  FROM unnest(ARRAY[NULL, '[]', '1', 'null', '{}', '{"url": null}', '{"url": 1}', '{"url": "ftp://x"}',
                    '{"url": "http://user:hunter2@x"}', '{"url": "http://x", "colour": "red"}',
                    '{"url": "http://x", "timeout": 30}', '{"url": "http://x", "timeout": "2h"}',
                    '{"url": "http://x", "max_in_flight": 0}', '{"url": "http://x", "max_in_flight": "1"}',
                    '{"url": "http://x", "http2": "yes"}', '{"url": "http://x", "mode": "other"}',
                    '{"url": "http://x", "headers": {"a b": "c"}}', '{"url": "http://x", "headers": {"a": 1}}',
                    '{"url": "http://x", "secret": ["hunter2"]}', '{"url": "http://x", "secret": "hunter2\n"}',
                    '{"url": "http://x", "secret": "hunter2", "secret_env": "RETRYSAFE_X"}',
                    '{"url": "http://x", "secret_env": "PATH"}', '{"url": "http://x", "secret_file": "/etc/passwd"}',
                    '{"url": "http://x", "ca_file": "/etc/passwd"}']::jsonb[]) AS o;
SELECT public.t40($$SELECT outbox_create_destination('t40', 'pull', '{"x": 1}')$$);
SELECT kind, option, type, required, "default", min, max, choices FROM outbox_kind_options
 WHERE kind IN ('pull', 'function') ORDER BY kind COLLATE "C", option COLLATE "C";

-- Files of the server
SET retrysafe.allowed_secret_directory = '/srv/secrets';
SELECT f, public.t40(format('SELECT outbox_create_destination(''t40'', ''http'', %L)',
                            jsonb_build_object('url', 'http://x', 'secret_file', f)))
  FROM unnest(ARRAY['/etc/passwd', '../passwd', '/srv/secrets/../x', '/srv/secrets', '/srv/secretsx/y', '', 'a/../../b']) AS f;
SELECT public.t40($$SELECT outbox_create_destination('t40', 'http', '{"url": "http://x", "secret_file": "a/b.key"}')$$);
SELECT options FROM outbox_status WHERE name = 't40';
SELECT outbox_drop_destination('t40');
RESET retrysafe.allowed_secret_directory;

-- Start
SELECT s, public.t40(format('SELECT outbox_create_destination(''t40'', ''pull'', start_at => %L)', s))
  FROM unnest(ARRAY[NULL, '', 'yesterday', '0', '-1', '1.5', '99999999999999999999', '999999999999999999']) AS s;
SELECT public.t40($$SELECT outbox_create_destination('t40', 'pull', start_at => 'earliest')$$);
SELECT outbox_drop_destination('t40');

-- Policies
SELECT a, public.t40('SELECT outbox_create_destination(''t40'', ''pull'', ' || a || ')')
  FROM unnest(ARRAY['shards => 0', 'shards => 257', 'shards => NULL', 'max_attempts => 0', 'max_attempts => 1000001',
                    'max_attempts => NULL', 'backoff => ''0''', 'backoff => ''2 days''', 'backoff => NULL',
                    'backoff => ''-1 s''', 'backoff => ''1 month''', 'backoff_max => ''500 ms''',
                    'backoff_max => ''31 days''', 'backoff_max => NULL', 'on_exhausted => ''drop''', 'on_exhausted => NULL',
                    'batch_events => 0', 'batch_events => 10001', 'batch_events => NULL', 'batch_bytes => 1023',
                    'batch_bytes => 268435457', 'batch_bytes => NULL', 'lease => ''99 ms''', 'lease => ''25 hours''',
                    'lease => NULL', 'lease => ''178000000 years''', 'event_types => ''{a,NULL}''', 'event_types => ''{""}''',
                    'event_types => ''{{a},{b}}''', 'event_types => ARRAY[repeat(''x'', 256)]']) AS a;

-- Altering
SELECT outbox_alter_destination('t40.hook', options => '{"mode": "structured", "timeout": null, "secret": null}', event_types => '{}',
                                max_attempts => 5, lease => '2 minutes');
SELECT options, event_types, max_attempts, backoff, lease, shards FROM outbox_status WHERE name = 't40.hook';
SELECT outbox_alter_destination('t40.hook');
SELECT outbox_alter_destination('t40.hook', shards => 2, event_types => '{order.*}');
SELECT shards, event_types FROM outbox_status WHERE name = 't40.hook';
SELECT a, public.t40('SELECT outbox_alter_destination(''t40.hook'', ' || a || ')')
  FROM unnest(ARRAY['options => ''[]''', 'options => ''{"url": null}''', 'options => ''{"colour": null}''', 'shards => 0',
                    'lease => ''0''', 'on_exhausted => ''''', 'backoff => ''2 hours''', 'batch_bytes => 0', 'max_attempts => 0',
                    'event_types => ''{NULL}''', 'batch_events => -1', 'backoff_max => ''0''']) AS a;
SELECT public.t40($$SELECT outbox_alter_destination('nobody')$$);
SELECT public.t40($$SELECT outbox_alter_destination(NULL)$$);

-- Pausing
SELECT outbox_pause('t40.hook'), outbox_pause('t40.hook');
SELECT state, paused FROM outbox_status WHERE name = 't40.hook';
SELECT outbox_resume('t40.hook'), outbox_resume('t40.hook');
SELECT state, paused FROM outbox_status WHERE name = 't40.hook';
SELECT outbox_pause('t40.hook');
SELECT public.t40(format('SELECT %s(%L)', f, a))
  FROM unnest(ARRAY['outbox_pause', 'outbox_resume']) AS f, unnest(ARRAY['nobody', NULL]) AS a ORDER BY f, a;

-- The shards change only while nothing is pending
SELECT outbox_emit(NULL, 't40-1', 'other', '{}') > 0;
SELECT public.t40($$SELECT outbox_alter_destination('t40.hook', shards => 3)$$);
SELECT outbox_emit(NULL, 't40-2', 'order.made', '{}') > 0;
SELECT public.t40($$SELECT outbox_alter_destination('t40.hook', shards => 4)$$);
SELECT backlog, oldest_pending_age > '0' AS has_age FROM outbox_status WHERE name = 't40.hook';
SELECT event_key, sent_at, event_id = outbox_event_id(event_key) AS same FROM outbox_events WHERE event_key LIKE 't40-%' ORDER BY 1;

-- Dropping
SELECT outbox_drop_destination('t40.hook'), outbox_drop_destination('t40.hook'), outbox_drop_destination('t40.a-b_C');
SELECT public.t40('SELECT outbox_drop_destination(NULL)');

-- Kind function
CREATE FUNCTION public.t40_good(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION public.t40_answers(event jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION public.t40_two(event jsonb, x integer) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE PROCEDURE public.t40_procedure(event jsonb) LANGUAGE sql AS 'SELECT';
SELECT f, public.t40(format('SELECT outbox_create_destination(''t40'', ''function'', %L)', jsonb_build_object('function', f)))
  FROM unnest(ARRAY['t40_missing', 't40_answers', 't40_two(jsonb, integer)', 't40_procedure', 't40_good(text)', 't40_good']) AS f;
SELECT options, run_as = current_user AS runs_as_creator FROM outbox_status WHERE name = 't40';
SELECT outbox_drop_destination('t40');
DROP FUNCTION public.t40_good, public.t40_answers, public.t40_two;
DROP PROCEDURE public.t40_procedure;

-- Kind postgres
SELECT public.t40($$SELECT outbox_create_destination('t40', 'postgres', '{"host": "db", "dbname": "d", "user": "u", "password": "hunter2"}')$$);
SELECT options FROM outbox_status WHERE name = 't40';
SELECT outbox_drop_destination('t40');

-- Retention and dead letters: what can be wrong
SELECT public.t40('SELECT outbox_cleanup(' || a || ')') FROM unnest(ARRAY['0', '-1', 'NULL']) AS a;
SELECT f, a, public.t40(format('SELECT %s(%s)', f, a))
  FROM unnest(ARRAY['outbox_retry', 'outbox_discard']) AS f, unnest(ARRAY['NULL', '''nobody''', '''x'', max_events => 0']) AS a ORDER BY f, a;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT public.t40('SELECT outbox_cleanup()');
ROLLBACK;

-- Consent
SELECT public.t40('SELECT outbox_consent(' || a || ')') FROM unnest(ARRAY['NULL', '''''', '''yes''', '''same''']) AS a;
SELECT outbox_suspended_reason();
DROP FUNCTION public.t40;
