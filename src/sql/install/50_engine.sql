-- The pull API: publishing from outside the database.

CREATE FUNCTION @extschema@.outbox_fetch(
  destination text, max_events integer DEFAULT 100, max_bytes integer DEFAULT 8388608,
  lease interval DEFAULT '30 seconds')
RETURNS TABLE (
  batch text, event_id uuid, id bigint, attempt integer, event_type text, event_key text, scope text,
  ordering_key text, idempotency_key text, payload jsonb, headers jsonb, created_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_fetch';
COMMENT ON FUNCTION @extschema@.outbox_fetch(text, integer, integer, interval)
IS 'hands out the next events of a destination, to be published within the lease and then acknowledged';

CREATE FUNCTION @extschema@.outbox_ack(batch text, up_to bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_ack';
COMMENT ON FUNCTION @extschema@.outbox_ack(text, bigint)
IS 'records a fetched batch as delivered, or its events up to one; returns how many were recorded';

CREATE FUNCTION @extschema@.outbox_nack(
  batch text, event_id uuid, reason text DEFAULT NULL, retry_after interval DEFAULT NULL, dead boolean DEFAULT false)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_nack';
COMMENT ON FUNCTION @extschema@.outbox_nack(text, uuid, text, interval, boolean)
IS 'gives an event of a batch back as failed; returns how many events of the batch wait now, later ones of its ordering key included';

CREATE FUNCTION @extschema@.outbox_renew(batch text, lease interval DEFAULT '30 seconds')
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_renew';
COMMENT ON FUNCTION @extschema@.outbox_renew(text, interval)
IS 'extends the lease of a batch that takes longer; returns when it ends';

CREATE FUNCTION @extschema@.outbox_release(batch text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_release';
COMMENT ON FUNCTION @extschema@.outbox_release(text)
IS 'ends the lease of a batch: what was not acknowledged is handed out again at once';

CREATE FUNCTION @extschema@.outbox_record(
  batch text, outcomes jsonb DEFAULT NULL, unreachable text DEFAULT NULL, retry_after interval DEFAULT NULL)
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_record';
COMMENT ON FUNCTION @extschema@.outbox_record(text, jsonb, text, interval)
IS 'records what became of a batch, and that its destination was unreachable; returns when to try that again';

CREATE PROCEDURE @extschema@.outbox_wait(destinations text[], timeout interval DEFAULT '30 seconds')
LANGUAGE c
AS 'MODULE_PATHNAME', 'retrysafe_outbox_wait';
COMMENT ON PROCEDURE @extschema@.outbox_wait(text[], interval)
IS 'waits, without a snapshot, until there may be something to fetch';

CREATE FUNCTION @extschema@.outbox_relay_destination(destination text)
RETURNS TABLE (kind text, library text, version text, shards integer, batch_events integer, batch_bytes integer,
               lease_ms bigint, on_exhausted text, paused boolean, database text)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_relay_destination';
COMMENT ON FUNCTION @extschema@.outbox_relay_destination(text)
IS 'how a destination is to be published to by somebody else than a worker; the version changes with any of it';

CREATE FUNCTION @extschema@.outbox_relay_options(destination text)
RETURNS TABLE (option text, value text, source text)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_relay_options';
COMMENT ON FUNCTION @extschema@.outbox_relay_options(text)
IS 'the options of a destination as its sink gets them, secrets included; source: inline, or the file or environment variable to read on the machine of the relay';
