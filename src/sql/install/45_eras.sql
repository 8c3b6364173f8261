-- Eras: consent to publish in a restored or cloned database.

CREATE FUNCTION @extschema@.outbox_consent(log text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_consent';
COMMENT ON FUNCTION @extschema@.outbox_consent(text)
IS 'lets a restored or cloned database publish: as the same log, or as a fork whose events get new ids';

CREATE FUNCTION @extschema@.outbox_suspended_reason()
RETURNS text LANGUAGE c STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_suspended_reason';
COMMENT ON FUNCTION @extschema@.outbox_suspended_reason()
IS 'why nothing is published in this database; null when publishing goes on';
