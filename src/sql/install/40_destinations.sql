-- Destinations and kinds.

CREATE FUNCTION @extschema@.outbox_create_destination(
  name text, kind text, options jsonb DEFAULT '{}', start_at text DEFAULT 'now', event_types text[] DEFAULT NULL,
  shards integer DEFAULT 1, max_attempts integer DEFAULT 10, backoff interval DEFAULT '1 second',
  backoff_max interval DEFAULT '10 minutes', on_exhausted text DEFAULT 'dead_letter',
  batch_events integer DEFAULT 500, batch_bytes integer DEFAULT 4194304, lease interval DEFAULT '30 seconds',
  workers boolean DEFAULT true)
RETURNS integer LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_create_destination';
COMMENT ON FUNCTION @extschema@.outbox_create_destination(
  text, text, jsonb, text, text[], integer, integer, interval, interval, text, integer, integer, interval, boolean)
IS 'makes a destination that events are published to; start_at is now, earliest or a position';

CREATE FUNCTION @extschema@.outbox_alter_destination(
  name text, options jsonb DEFAULT NULL, event_types text[] DEFAULT NULL, shards integer DEFAULT NULL,
  max_attempts integer DEFAULT NULL, backoff interval DEFAULT NULL, backoff_max interval DEFAULT NULL,
  on_exhausted text DEFAULT NULL, batch_events integer DEFAULT NULL, batch_bytes integer DEFAULT NULL,
  lease interval DEFAULT NULL, workers boolean DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_alter_destination';
COMMENT ON FUNCTION @extschema@.outbox_alter_destination(
  text, jsonb, text[], integer, integer, interval, interval, text, integer, integer, interval, boolean)
IS 'changes a destination; null leaves a value as it is, options are merged and null removes one, empty event_types mean all';

CREATE FUNCTION @extschema@.outbox_drop_destination(name text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_drop_destination';
COMMENT ON FUNCTION @extschema@.outbox_drop_destination(text)
IS 'drops a destination with its progress and dead letters; false when there is none of that name';

CREATE FUNCTION @extschema@.outbox_pause(name text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_pause';
COMMENT ON FUNCTION @extschema@.outbox_pause(text)
IS 'stops publishing to a destination until outbox_resume';

CREATE FUNCTION @extschema@.outbox_resume(name text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_resume';
COMMENT ON FUNCTION @extschema@.outbox_resume(text)
IS 'publishes to a paused destination again, and ends a back-off';

CREATE FUNCTION @extschema@.outbox_register_kind(kind text, library text, options jsonb)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_register_kind';
COMMENT ON FUNCTION @extschema@.outbox_register_kind(text, text, jsonb)
IS 'makes a kind of destination known whose sink is in the named library (superuser)';

CREATE FUNCTION @extschema@.outbox_unregister_kind(kind text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_unregister_kind';
COMMENT ON FUNCTION @extschema@.outbox_unregister_kind(text)
IS 'forgets a registered kind that no destination uses (superuser)';

CREATE FUNCTION @extschema@.outbox_redacted_options(kind text, options jsonb)
RETURNS jsonb LANGUAGE c STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_redacted_options';
COMMENT ON FUNCTION @extschema@.outbox_redacted_options(text, jsonb)
IS 'options of a destination without what must not be shown, for the views';

CREATE FUNCTION @extschema@.outbox_built_in_kinds()
RETURNS TABLE (kind text, library text) LANGUAGE c STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_built_in_kinds';
COMMENT ON FUNCTION @extschema@.outbox_built_in_kinds()
IS 'the kinds of destinations that come with the extension, and the library that delivers to each';

CREATE FUNCTION @extschema@.outbox_options_of_kind(kind text)
RETURNS TABLE (option text, type text, required boolean, "default" text, min bigint, max bigint, choices text,
               description text)
LANGUAGE c STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_options_of_kind';
COMMENT ON FUNCTION @extschema@.outbox_options_of_kind(text)
IS 'the options that destinations of a kind take';

CREATE FUNCTION @extschema@.outbox_retry(
  destination text, event_type text DEFAULT NULL, ordering_key text DEFAULT NULL, event_id uuid DEFAULT NULL,
  reason_like text DEFAULT NULL, max_events bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_retry';
COMMENT ON FUNCTION @extschema@.outbox_retry(text, text, text, uuid, text, bigint)
IS 'sends dead letters again that match all given filters, in order; returns how many';

CREATE FUNCTION @extschema@.outbox_discard(
  destination text, event_type text DEFAULT NULL, ordering_key text DEFAULT NULL, event_id uuid DEFAULT NULL,
  reason_like text DEFAULT NULL, max_events bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_discard';
COMMENT ON FUNCTION @extschema@.outbox_discard(text, text, text, uuid, text, bigint)
IS 'gives up dead letters that match all given filters; returns how many';
