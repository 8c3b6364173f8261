-- The tables, sequences and indexes of some schemas, with their sizes, and with their dead rows or entries where somebody
-- wants to know them.
WITH tables AS (
  SELECT oid FROM pg_class WHERE relkind IN ('r', 'S') AND relnamespace::regnamespace::text = ANY (%(schemas)s)
), relations AS (
  SELECT oid, oid AS belongs_to FROM tables
  UNION ALL
  SELECT i.indexrelid, i.indrelid FROM pg_index i JOIN tables t ON t.oid = i.indrelid
)
SELECT r.oid::regclass::text, c.relkind::text, pg_relation_size(r.oid),
       CASE WHEN %(count_dead)s AND c.relkind IN ('r', 'i') THEN (pgstattuple(r.oid)).dead_tuple_count END
  FROM relations r JOIN pg_class c ON c.oid = r.oid
 ORDER BY r.belongs_to::regclass::text, r.oid = r.belongs_to DESC, r.oid::regclass::text
