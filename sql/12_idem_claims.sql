-- Claims: what savepoints, exception blocks, COMMIT and PREPARE do to a key that was begun.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

-- A transaction cannot end with a key that it began and did not complete.
BEGIN;
SELECT outcome FROM idem_begin('k', 'a');
COMMIT;
SELECT outcome FROM idem_begin('k', 'a');
SELECT outcome FROM idem_peek('k', 'a');
BEGIN;
SELECT outcome FROM idem_begin('k', 'a');
PREPARE TRANSACTION 'idem';
-- ROLLBACK leaves no trace.
BEGIN;
SELECT outcome FROM idem_begin('k', 'a');
ROLLBACK;
SELECT outcome FROM idem_peek('k', 'a');

-- Rolled back to a savepoint before begin: lost.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_begin('k', 'a');
ROLLBACK TO s;
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 21075;
SELECT idem_complete('k');
ROLLBACK TO s;
SELECT outbox_emit('k', 'event', 'type', '{}');
ROLLBACK TO s;
COMMIT;
SET retrysafe.on_lost_claim = 'error';
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_begin('k', 'a');
SELECT outcome FROM idem_begin('k2', 'a');
ROLLBACK TO s;
COMMIT;
-- Begun again: nothing is lost.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_begin('k', 'a');
ROLLBACK TO s;
SELECT outcome FROM idem_begin('k', 'a');
SELECT idem_complete('k', '1');
COMMIT;
-- Begun before the savepoint: still owned after it.
BEGIN;
SELECT outcome FROM idem_begin('k3', 'a');
SAVEPOINT s;
SELECT idem_complete('k3', '"first"');
ROLLBACK TO s;
SELECT idem_complete('k3', '"second"');
COMMIT;
SELECT * FROM idem_begin('k3', 'a');

-- Released savepoints keep what they did, as far as the next one out goes.
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SELECT outcome FROM idem_begin('k4', 'a');
RELEASE b;
SAVEPOINT c;
SELECT idem_complete('k4', '"in c"');
SELECT * FROM idem_begin('k4', 'a');
ROLLBACK TO c;
SELECT idem_complete('k4', '"in a"');
RELEASE a;
SELECT * FROM idem_begin('k4', 'a');
COMMIT;
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idem_begin('k5', 'a');
SAVEPOINT b;
SELECT idem_complete('k5');
RELEASE b;
ROLLBACK TO a;
SELECT idem_complete('k5');
ROLLBACK;

-- Forgetting is undone as well.
BEGIN;
SELECT outcome FROM idem_begin('k6', 'a');
SELECT idem_complete('k6', '6');
SAVEPOINT s;
SELECT idem_forget('k6');
SELECT outcome FROM idem_begin('k6', 'a');
ROLLBACK TO s;
SELECT * FROM idem_begin('k6', 'a');
COMMIT;
SELECT * FROM idem_begin('k6', 'a');

-- An exception block is a savepoint.
DO $$
BEGIN
  PERFORM retrysafe.idem_begin('k7', 'a');
  RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
END
$$;
RESET retrysafe.on_lost_claim;
DO $$
BEGIN
  PERFORM retrysafe.idem_begin('k7', 'a');
  RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
END
$$;
-- A business failure, the right way round
DO $$
DECLARE
  answer record;
BEGIN
  SELECT * INTO answer FROM retrysafe.idem_begin('k8', 'a');
  BEGIN
    PERFORM 1 / 0;
  EXCEPTION WHEN division_by_zero THEN
    PERFORM retrysafe.idem_complete('k8', '{"error": "division by zero"}', status => 'failed');
  END;
END
$$;
SELECT * FROM idem_begin('k8', 'a');
-- A procedure that commits
DO $$
BEGIN
  FOR i IN 1..3 LOOP
    PERFORM retrysafe.idem_begin('loop' || i, 'a');
    PERFORM retrysafe.idem_complete('loop' || i, to_jsonb(i));
    COMMIT;
  END LOOP;
  PERFORM retrysafe.idem_begin('loop4', 'a');
  COMMIT;
END
$$;
SELECT key, response_json FROM idempotency_records WHERE key LIKE 'loop%' ORDER BY key;
-- A begin that is rolled back takes its digest along: what is saved is the first one's.
BEGIN;
SELECT outcome FROM idem_begin('terms', 'a', ttl => '1 day');
SAVEPOINT s;
SELECT idem_complete('terms', '1');
SELECT idem_forget('terms');
SELECT outcome FROM idem_begin('terms', 'b', ttl => '2 days');
ROLLBACK TO s;
SELECT idem_complete('terms', '1');
COMMIT;
SELECT request_hash, expires_at - completed_at AS ttl FROM idempotency_records WHERE key = 'terms';
-- Constraint triggers run before the check, so they may complete.
CREATE TABLE public.idem_orders (id int);
CREATE FUNCTION public.idem_finish() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM retrysafe.idem_complete('deferred', to_jsonb(NEW.id));
  RETURN null;
END
$$;
CREATE CONSTRAINT TRIGGER finish AFTER INSERT ON public.idem_orders DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION public.idem_finish();
BEGIN;
SELECT outcome FROM idem_begin('deferred', 'a');
INSERT INTO public.idem_orders VALUES (9);
COMMIT;
SELECT * FROM idem_begin('deferred', 'a');
DROP TABLE public.idem_orders;
DROP FUNCTION public.idem_finish();

SELECT count(idem_forget(key, scope)) > 0 AS cleaned FROM idempotency_records;
