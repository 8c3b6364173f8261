-- Kinds that other packages bring.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
RESET client_min_messages;
SET search_path = retrysafe, public;
CREATE FUNCTION public.t41(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  message text;
  hint text;
BEGIN
  EXECUTE statement;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
  RETURN SQLSTATE || ': ' || message || coalesce(' | ' || nullif(hint, ''), '');
END
$$;

\set VERBOSITY sqlstate
SELECT outbox_register_kind('queue41', 'my_queue', '[
  {"name": "broker", "type": "string", "required": true, "description": "Where it is."},
  {"name": "size", "type": "integer", "min": 1, "max": 10, "default": 5},
  {"name": "wait", "type": "duration", "min": "10ms", "max": "1min", "default": "1s"},
  {"name": "mode", "type": "enum", "choices": ["fast", "safe"], "default": "safe"},
  {"name": "token", "type": "secret"}]');
\set VERBOSITY default
SELECT kind, library, option, type, required, "default", min, max, choices, description FROM outbox_kind_options
 WHERE kind = 'queue41' ORDER BY option COLLATE "C";
SELECT o, public.t41(format('SELECT outbox_create_destination(''t41'', ''queue41'', %L)', o))
  FROM unnest(ARRAY['{}', '{"broker": "b", "size": 11}', '{"broker": "b", "wait": "5ms"}', '{"broker": "b", "mode": "x"}',
                    '{"broker": "b", "token": "hunter2", "wait": "20ms"}']::jsonb[]) AS o;
SELECT options FROM outbox_status WHERE name = 't41';
SELECT public.t41($$SELECT outbox_unregister_kind('queue41')$$);
SELECT outbox_drop_destination('t41');
SELECT regexp_replace(public.t41($$SELECT outbox_create_destination('t41', 'pigeon')$$),
                      'function, .*pull.*?(, queue41[.])$', '...\1') AS t41;

-- What can be wrong
SELECT a, public.t41('SELECT outbox_register_kind(' || a || ')')
  FROM unnest(ARRAY['NULL, ''l'', ''[]''', '''k'', NULL, ''[]''', '''k'', ''l'', NULL', ''''', ''l'', ''[]''',
                    '''K'', ''l'', ''[]''', '''k'', ''../evil'', ''[]''', '''k'', ''a/b'', ''[]''', '''k'', ''evil.so'', ''[]''',
                    '''http'', ''l'', ''[]''', '''queue41'', ''l'', ''[]''']) AS a;
SELECT l, public.t41(format('SELECT outbox_register_kind(''k41'', ''l'', %L)', l))
  FROM unnest(ARRAY['{}', '1', '[1]', '[{}]', '[{"name": "a"}]', '[{"name": "a", "type": "regex"}]', '[{"name": "A", "type": "string"}]',
                    '[{"name": "a", "type": "string", "colour": 1}]', '[{"name": "a", "type": "string"}, {"name": "a", "type": "url"}]',
                    '[{"name": "a", "type": "secret"}, {"name": "a_file", "type": "string"}]',
                    '[{"name": "a", "type": "integer", "min": "x"}]', '[{"name": "a", "type": "integer", "min": 2, "max": 1}]',
                    '[{"name": "a", "type": "integer", "default": "x"}]', '[{"name": "a", "type": "enum"}]',
                    '[{"name": "a", "type": "enum", "choices": "x"}]',
                    '[{"name": "a", "type": "enum", "choices": [1]}]', '[{"name": "a", "type": "enum", "choices": ["a|b"]}]',
                    '[{"name": "a", "type": "string", "required": "yes"}]', '[{"name": "a", "type": "secret", "default": "x"}]',
                    '[{"name": 1, "type": "string"}]', '[{"name": "a", "type": "string", "default": {}}]']::jsonb[]) AS l;
SELECT public.t41('SELECT outbox_unregister_kind(NULL)');

-- Names that the broker of a built-in kind never takes: refused at once, also where the destination is altered.
SELECT k, o, public.t41(format('SELECT outbox_create_destination(''t41'', %L, %L)', k, o))
  FROM (VALUES ('kafka', '{"brokers": "h", "topic": "my topic"}'::jsonb), ('nats', '{"servers": "h", "subject": "a..b"}'),
               ('nats', '{"servers": "h", "subject": "s", "stream": "a.b"}'),
               ('nats', '{"servers": "h", "subject": "s", "inbox_prefix": "$X.*"}'),
               ('rabbitmq', '{"host": "h", "user": "u", "password": "p", "exchange": ""}'),
               ('kafka', '{"brokers": "h", "topic": "t.{type}"}')) AS t (k, o);
SELECT public.t41(format('SELECT outbox_create_destination(''long'', ''rabbitmq'', %L)',
                         jsonb_build_object('host', 'h', 'user', 'u', 'password', 'p', o, repeat('x', 256))))
  FROM unnest('{exchange,routing_key}'::text[]) AS o;
SELECT public.t41($$SELECT outbox_alter_destination('t41', '{"topic": "no/topic"}')$$);
-- Options that mean nothing without others.
SELECT public.t41($$SELECT outbox_alter_destination('t41', '{"user": "u"}')$$);
SELECT public.t41($$SELECT outbox_alter_destination('t41', '{"user": "u", "password": "p", "sasl_mechanism": "plain"}')$$);
SELECT public.t41($$SELECT outbox_alter_destination('t41', '{"password": null}')$$);
SELECT outbox_drop_destination('t41');
SELECT outbox_unregister_kind('queue41'), outbox_unregister_kind('queue41'), outbox_unregister_kind('http');
DROP FUNCTION public.t41;
