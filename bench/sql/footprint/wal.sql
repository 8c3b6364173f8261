-- Bytes of WAL between two positions, by the relation that each record touches first; commits, for example, touch none.
-- What is written meanwhile for other databases is left out.
SELECT coalesce(pg_filenode_relation(0, touched[2]::oid)::regclass::text, resource_manager || ': ' || record_type),
       sum(record_length)::bigint
  FROM (SELECT *, regexp_match(block_ref, 'rel \d+/(\d+)/(\d+)') AS touched
          FROM pg_get_wal_records_info(%(start)s, %(end)s)) AS records
 WHERE touched IS NULL OR touched[1]::oid IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
 GROUP BY 1
