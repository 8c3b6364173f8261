-- Nothing of retrysafe is executable or readable by PUBLIC; retrysafe_grant hands out what a role needs.

-- The functions and views that belong to an access. Functions that a view calls run with the rights of who reads
-- the view, so reading it includes them.
CREATE FUNCTION @extschema@.retrysafe_objects_of(access text)
RETURNS TABLE (kind text, object oid, identity text)
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
  WITH members AS (
    SELECT d.classid, d.objid
      FROM pg_depend d
      JOIN pg_extension e ON e.oid = d.refobjid
     WHERE e.extname = 'retrysafe' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  ), functions AS (
    SELECT p.oid, p.proname::text AS name, p.oid::regprocedure::text AS identity
      FROM members m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
  ), views AS (
    SELECT c.oid, c.oid::regclass::text AS identity
      FROM members m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid AND c.relkind = 'v'
  ), called_by_views AS (
    SELECT d.refobjid AS oid
      FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                                        AND d.refclassid = 'pg_proc'::regclass
     WHERE r.ev_class IN (SELECT oid FROM views)
  )
  SELECT 'ROUTINE', f.oid, f.identity
    FROM functions f
   WHERE CASE
         WHEN access = 'write'
         THEN f.name IN ('idem_begin', 'idem_try_begin', 'idem_complete', 'idem_run', 'idem_hash', 'idem_peek', 'outbox_emit',
                         'outbox_cancel', 'outbox_event_id', 'inbox_accept')
         WHEN access IN ('consume', 'relay')
         THEN f.name IN ('outbox_fetch', 'outbox_ack', 'outbox_nack', 'outbox_renew', 'outbox_release', 'outbox_record',
                         'outbox_wait', 'outbox_relay_destination', 'outbox_options_of_kind')
              OR (access = 'relay' AND f.name = 'outbox_relay_options')
         WHEN access = 'monitor' THEN f.oid IN (SELECT oid FROM called_by_views)
         -- Not what tells secrets, nor what only the owner and triggers call.
         WHEN access = 'admin'
         THEN f.name NOT IN ('outbox_relay_options', 'retrysafe_apply_grant', 'retrysafe_apply_revoke',
                             'outbox_only_the_owner_writes')
         END
  UNION ALL
  SELECT 'TABLE', v.oid, v.identity FROM views v WHERE access IN ('monitor', 'admin')
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_objects_of(text)
IS 'the functions and views that an access of retrysafe_grant consists of';

-- Run as the owner of the extension: the holder of admin access hands access on without owning it.
CREATE FUNCTION @extschema@.retrysafe_grant(role regrole, access text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_grant';
COMMENT ON FUNCTION @extschema@.retrysafe_grant(regrole, text)
IS 'gives a role the access write, consume, relay, monitor or admin';

CREATE FUNCTION @extschema@.retrysafe_revoke(role regrole, access text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_revoke';
COMMENT ON FUNCTION @extschema@.retrysafe_revoke(regrole, text)
IS 'takes an access from a role; what its other accesses include stays';

CREATE FUNCTION @extschema@.retrysafe_apply_grant(role regrole, access text)
RETURNS void LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'retrysafe');  -- it may be renamed
  o record;
BEGIN
  EXECUTE pg_catalog.format('SELECT %s.retrysafe_check_access($1, $2)', schema) USING role, access;
  EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
  FOR o IN EXECUTE pg_catalog.format('SELECT * FROM %s.retrysafe_objects_of($1)', schema) USING access LOOP
    EXECUTE pg_catalog.format('GRANT %s ON %s %s TO %s', CASE o.kind WHEN 'TABLE' THEN 'SELECT' ELSE 'EXECUTE' END, o.kind,
                   o.identity, role);
  END LOOP;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_apply_grant(regrole, text)
IS 'what retrysafe_grant does, with the rights of who calls it';

CREATE FUNCTION @extschema@.retrysafe_apply_revoke(role regrole, access text)
RETURNS void LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'retrysafe');
  o record;
  kept text[];
BEGIN
  EXECUTE pg_catalog.format('SELECT %s.retrysafe_check_access($1, $2)', schema) USING role, access;
  IF role = (SELECT extowner FROM pg_extension WHERE extname = 'retrysafe') THEN
    RAISE EXCEPTION 'no access is taken from the owner of the extension'
      USING ERRCODE = 'RS214', HINT = 'All calls run with the rights of the owner. REASSIGN OWNED makes another role the owner.';
  END IF;
  -- Some functions belong to two accesses: what another access that the role holds includes stays. Revoking admin takes
  -- everything.
  EXECUTE pg_catalog.format(
    $q$SELECT pg_catalog.array_agg(other)
         FROM pg_catalog.unnest(ARRAY['write', 'consume', 'relay', 'monitor', 'admin']) AS other
        WHERE $2 <> 'admin' AND other <> $2 AND %s.retrysafe_holds($1, other)$q$, schema)
    INTO kept USING role, access;
  FOR o IN EXECUTE pg_catalog.format(
    $q$SELECT DISTINCT mine.kind, mine.identity
         FROM pg_catalog.unnest(CASE $1 WHEN 'admin' THEN ARRAY['admin', 'relay'] ELSE ARRAY[$1] END) AS taken,
              %1$s.retrysafe_objects_of(taken) AS mine
        WHERE NOT EXISTS (SELECT FROM pg_catalog.unnest($2) AS other, %1$s.retrysafe_objects_of(other) AS theirs
                           WHERE theirs.kind = mine.kind AND theirs.object = mine.object)$q$, schema)
    USING access, kept
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON %s %s FROM %s', o.kind, o.identity, role);
  END LOOP;
  IF kept IS NULL THEN
    EXECUTE pg_catalog.format('REVOKE USAGE ON SCHEMA %s FROM %s', schema, role);
  END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_apply_revoke(regrole, text)
IS 'what retrysafe_revoke does, with the rights of who calls it';

CREATE FUNCTION @extschema@.retrysafe_check_access(role regrole, access text)
RETURNS void LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF access IS NULL OR access NOT IN ('write', 'consume', 'relay', 'monitor', 'admin') THEN
    RAISE EXCEPTION 'unknown access %', coalesce('"' || access || '"', 'NULL')
      USING ERRCODE = 'RS214', HINT = 'It must be write, consume, relay, monitor or admin.';
  END IF;
  IF role IS NULL OR role = 0 THEN
    RAISE EXCEPTION 'access is given to a role, not to everybody'
      USING ERRCODE = 'RS214', HINT = 'Name the role that the service connects as.';
  END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_check_access(regrole, text) IS 'raises unless role and access exist';

-- Given to the role itself, not through a membership.
CREATE FUNCTION @extschema@.retrysafe_holds(role regrole, access text)
RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
  SELECT coalesce(pg_catalog.bool_and(EXISTS (
           SELECT FROM pg_catalog.aclexplode(CASE o.kind
                                               WHEN 'TABLE' THEN (SELECT relacl FROM pg_class WHERE oid = o.object)
                                               ELSE (SELECT proacl FROM pg_proc WHERE oid = o.object)
                                             END) AS item
            WHERE item.grantee = role)), false)
    FROM @extschema@.retrysafe_objects_of(access) AS o;
END;
COMMENT ON FUNCTION @extschema@.retrysafe_holds(regrole, text) IS 'whether a role was given all of an access';

-- Nor by roles that default privileges of the installing role name: they were not meant for saved answers and secrets.
DO $$
DECLARE
  given record;
BEGIN
  FOR given IN
    WITH objects AS (
      SELECT 'ROUTINE' AS kind, 'pg_proc'::regclass AS catalog, oid, oid::regprocedure::text AS identity,
             coalesce(proacl, pg_catalog.acldefault('f', proowner)) AS acl, proowner AS owner
        FROM pg_proc
      UNION ALL
      SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, 'pg_class'::regclass, oid, oid::regclass::text,
             relacl, relowner
        FROM pg_class WHERE relkind IN ('r', 'v', 'S')
    )
    SELECT DISTINCT o.kind, o.identity, CASE item.grantee WHEN 0 THEN 'PUBLIC' ELSE item.grantee::regrole::text END AS role
      FROM objects o
      JOIN pg_depend d ON d.classid = o.catalog AND d.objid = o.oid AND d.deptype = 'e'
      JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid AND e.extname = 'retrysafe',
           pg_catalog.aclexplode(o.acl) AS item
     WHERE item.grantee <> o.owner
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON %s %s FROM %s', given.kind, given.identity, given.role);
  END LOOP;
END
$$;
