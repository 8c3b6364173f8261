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

CREATE FUNCTION @extschema@.outbox_awaits_standby()
RETURNS boolean LANGUAGE c VOLATILE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_awaits_standby';
COMMENT ON FUNCTION @extschema@.outbox_awaits_standby()
IS 'whether the synchronous standbys, for which events wait, are behind at this moment';

CREATE FUNCTION @extschema@.outbox_cleanup(max_rows integer DEFAULT 10000)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_cleanup';
COMMENT ON FUNCTION @extschema@.outbox_cleanup(integer)
IS 'removes what retention does not keep, as workers do by themselves; returns how many rows went';
