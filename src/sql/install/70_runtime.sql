-- The processes.

CREATE FUNCTION @extschema@.outbox_run_worker()
RETURNS integer LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_run_worker';
COMMENT ON FUNCTION @extschema@.outbox_run_worker()
IS 'starts one worker for this database by hand and returns its process id; for servers without a launcher';

CREATE FUNCTION @extschema@.outbox_list_workers()
RETURNS TABLE (process text, pid integer, database name, state text, since timestamptz, shards integer,
               last_error text, error_at timestamptz)
LANGUAGE c VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'retrysafe_outbox_list_workers';
COMMENT ON FUNCTION @extschema@.outbox_list_workers() IS 'the launcher and the workers of the whole server';

CREATE VIEW @extschema@.outbox_workers AS SELECT * FROM @extschema@.outbox_list_workers();
COMMENT ON VIEW @extschema@.outbox_workers
IS 'the launcher and the workers of the whole server; empty where retrysafe is not in shared_preload_libraries';
