-- The tables, sequences and indexes of the extension and of one subject, with their sizes and dead rows.
WITH tables AS (
  SELECT c.oid
    FROM pg_class c
   WHERE c.relkind IN ('r', 'S')
     AND (c.relnamespace = %(schema)s::regnamespace
          OR EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                      WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
                        AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'retrysafe'))
), relations AS (
  SELECT oid, oid AS belongs_to FROM tables
  UNION ALL
  SELECT i.indexrelid, i.indrelid FROM pg_index i JOIN tables t ON t.oid = i.indrelid
)
SELECT r.oid::regclass::text, pg_relation_size(r.oid), CASE WHEN c.relkind = 'r' THEN (pgstattuple(r.oid)).dead_tuple_count END
  FROM relations r JOIN pg_class c ON c.oid = r.oid
 ORDER BY r.belongs_to::regclass::text, r.oid = r.belongs_to DESC, r.oid::regclass::text
