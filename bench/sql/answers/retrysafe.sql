-- Answers without the requests around them. They expire within a second.
CREATE PROCEDURE save_answers(first integer, last integer, per_transaction integer) LANGUAGE plpgsql AS $$
BEGIN
  SET retrysafe.idem_retention = '1s';
  FOR start IN first..last BY per_transaction LOOP
    PERFORM (retrysafe.idem_begin('key-' || n, sha256(n::text::bytea))).outcome,
            retrysafe.idem_complete('key-' || n, '{"order": 1}')
       FROM generate_series(start, start + per_transaction - 1) AS n;
    COMMIT;
  END LOOP;
END
$$;
