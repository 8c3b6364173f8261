-- idem_run with a handler.
CREATE FUNCTION place_order(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  key constant text := request ->> 'request';
  order_id bigint;
BEGIN
  INSERT INTO retrysafe_run.orders (customer, amount, items)
  VALUES (request ->> 'customer', (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  PERFORM retrysafe.outbox_emit(key, key || ':placed', 'order.placed', request, request ->> 'customer'),
          retrysafe.outbox_emit(key, key || ':audit', 'audit.order_placed', request, request ->> 'customer');
  RETURN jsonb_build_object('order', order_id);
END
$$;
