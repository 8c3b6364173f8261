-- The same idempotency key by hand, and the events in a queue of PgQ.
SELECT pgq.create_queue('orders');
SELECT pgq.register_consumer('orders', 'relay');

CREATE TABLE idempotency_keys (
  key text PRIMARY KEY,
  request_hash bytea NOT NULL,
  response jsonb,
  created_at timestamptz NOT NULL DEFAULT now(),
  completed_at timestamptz
);

CREATE FUNCTION place_order(request_key text, digest bytea, request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  known record;
  order_id bigint;
  answer jsonb;
BEGIN
  INSERT INTO pgq_orders.idempotency_keys (key, request_hash) VALUES (request_key, digest) ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT k.request_hash, k.response INTO known FROM pgq_orders.idempotency_keys k WHERE k.key = request_key;
    IF known.request_hash <> digest THEN
      RAISE EXCEPTION 'key % was used for another request', request_key;
    END IF;
    RETURN known.response;
  END IF;

  INSERT INTO pgq_orders.orders (customer, amount, items)
  VALUES (request ->> 'customer', (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  PERFORM pgq.insert_event('orders', 'order.placed', request::text, request_key || ':placed', request ->> 'customer', NULL, NULL),
          pgq.insert_event('orders', 'audit.order_placed', request::text, request_key || ':audit', request ->> 'customer', NULL, NULL);

  answer := jsonb_build_object('order', order_id);
  UPDATE pgq_orders.idempotency_keys SET response = answer, completed_at = now() WHERE key = request_key;
  RETURN answer;
END
$$;
