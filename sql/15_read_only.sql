-- Nothing that writes passes for done in a read-only transaction, also where there is nothing to write.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
SELECT FROM outbox_create_destination('there', 'pull');
CREATE FUNCTION pg_temp.code(call text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE 'SELECT FROM ' || call;
  RETURN 'nothing was wrong';
EXCEPTION WHEN OTHERS THEN
  RETURN sqlstate;
END$$;
BEGIN READ ONLY;
SELECT call, pg_temp.code(call) FROM unnest(ARRAY[
  $$idem_begin('k', 'h')$$, $$idem_try_begin('k', 'h')$$, $$idem_forget('k')$$, $$idem_cleanup()$$,
  $$idem_run('k', '1', 'pg_temp.code(text)')$$, $$inbox_accept('c', 'e')$$, $$inbox_accept('c', ARRAY['e'])$$,
  $$inbox_accept('c', '{}'::text[])$$,
  $$outbox_emit(NULL, 'e', 't', '{}')$$, $$outbox_emit(NULL, 'e', 't', '{}', deliver_after => 'infinity')$$, $$outbox_cancel('e')$$,
  $$outbox_create_destination('d', 'pull')$$, $$outbox_alter_destination('there', lease => '1 min')$$, $$outbox_drop_destination('there')$$,
  $$outbox_alter_destination('there')$$, $$outbox_pause('there')$$, $$outbox_resume('there')$$,
  $$outbox_retry('there')$$, $$outbox_discard('there')$$, $$outbox_consent('move')$$, $$outbox_cleanup()$$,
  $$outbox_fetch('there')$$, $$outbox_ack('1:1')$$, $$outbox_nack('1:1', gen_random_uuid())$$, $$outbox_renew('1:1')$$, $$outbox_release('1:1')$$,
  $$outbox_unregister_kind('null')$$,
  $$retrysafe_grant('pg_monitor', 'monitor')$$, $$retrysafe_revoke('pg_monitor', 'monitor')$$]) AS call;
ROLLBACK;
SELECT outbox_drop_destination('there');
