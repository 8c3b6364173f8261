-- The same three calls, with events that have no keys of their own: they are numbered within the request.
CREATE FUNCTION place_order(request_key text, digest bytea, request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  claim record;
  customer constant text := request ->> 'customer';
  event bigint;
  order_id bigint;
  answer jsonb;
BEGIN
  claim := retrysafe.idem_begin(request_key, digest);
  CASE claim.outcome
    WHEN 'replay'   THEN RETURN claim.response;
    WHEN 'conflict' THEN RAISE EXCEPTION 'key % was used for another request', request_key;
    ELSE NULL;
  END CASE;

  INSERT INTO retrysafe_numbered.orders (customer, amount, items)
  VALUES (customer, (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  answer := jsonb_build_object('order', order_id);
  -- An assignment costs less than PERFORM, which starts the executor.
  event := retrysafe.outbox_emit(request_key, NULL, 'order.placed', request, customer);
  event := retrysafe.outbox_emit(request_key, NULL, 'audit.order_placed', request, customer);
  PERFORM retrysafe.idem_complete(request_key, answer);
  RETURN answer;
END
$$;
