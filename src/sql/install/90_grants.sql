-- Nothing of retrysafe is executable or readable by PUBLIC; retrysafe_grant hands out what a role needs.
DO $$
DECLARE
  f pg_catalog.regprocedure;
BEGIN
  FOR f IN SELECT d.objid FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid
            WHERE e.extname = 'retrysafe' AND d.deptype = 'e'
              AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass
              AND d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
  END LOOP;
END
$$;
