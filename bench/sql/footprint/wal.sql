-- Bytes of WAL between two positions, by the relation that each record touches first; commits, for example, touch none.
SELECT coalesce(pg_filenode_relation(0, (regexp_match(block_ref, 'rel \d+/\d+/(\d+)'))[1]::oid)::regclass::text,
                resource_manager || ': ' || record_type) AS relation,
       sum(record_length)::bigint AS bytes
  FROM pg_get_wal_records_info(%(start)s, %(end)s)
 GROUP BY 1
