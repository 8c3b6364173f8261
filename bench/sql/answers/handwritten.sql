CREATE PROCEDURE save_answers(first integer, last integer, per_transaction integer) LANGUAGE plpgsql AS $$
BEGIN
  FOR start IN first..last BY per_transaction LOOP
    INSERT INTO handwritten.idempotency_keys (key, request_hash, response, completed_at)
    SELECT 'key-' || n, sha256(n::text::bytea), '{"order": 1}', now()
      FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
  END LOOP;
END
$$;
