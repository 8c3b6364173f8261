-- idem_run with a handler.
CREATE FUNCTION place_order(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  key constant text := request ->> 'request';
  customer constant text := request ->> 'customer';
  order_id bigint;
  event bigint;
BEGIN
  INSERT INTO retrysafe_run.orders (customer, amount, items)
  VALUES (customer, (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  -- An assignment costs less than PERFORM, which starts the executor.
  event := retrysafe.outbox_emit(key, key || ':placed', 'order.placed', request, customer);
  event := retrysafe.outbox_emit(key, key || ':audit', 'audit.order_placed', request, customer);
  RETURN jsonb_build_object('order', order_id);
END
$$;
