-- Writing events.

CREATE FUNCTION @extschema@.outbox_emit(
  key text, event_key text, event_type text, payload jsonb, ordering_key text DEFAULT NULL, headers jsonb DEFAULT NULL,
  deliver_after timestamptz DEFAULT NULL, scope text DEFAULT '')
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_emit';
COMMENT ON FUNCTION @extschema@.outbox_emit IS
  'Appends an event in this transaction and returns its position, null for a delayed event.';

CREATE FUNCTION @extschema@.outbox_cancel(event_key text, scope text DEFAULT '')
RETURNS boolean LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_cancel';
COMMENT ON FUNCTION @extschema@.outbox_cancel IS
  'Removes a delayed event that is not in the log yet; false when there is none.';

CREATE FUNCTION @extschema@.outbox_event_id(event_key text, scope text DEFAULT '')
RETURNS uuid LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_event_id';
COMMENT ON FUNCTION @extschema@.outbox_event_id IS
  'The id under which the event of this key is published; null before the log has its identity.';
