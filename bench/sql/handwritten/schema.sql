-- What a good engineer writes by hand: the answer under a unique key, the events in an outbox table, one call.
CREATE TABLE idempotency_keys (
  key text PRIMARY KEY,
  request_hash bytea NOT NULL,
  response jsonb,
  created_at timestamptz NOT NULL DEFAULT now(),
  completed_at timestamptz
);
CREATE TABLE outbox (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  event_key text NOT NULL UNIQUE,
  event_type text NOT NULL,
  ordering_key text,
  payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  sent_at timestamptz
);
CREATE INDEX outbox_unsent ON outbox (id) WHERE sent_at IS NULL;

CREATE FUNCTION place_order(request_key text, digest bytea, request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  known record;
  order_id bigint;
  answer jsonb;
BEGIN
  INSERT INTO handwritten.idempotency_keys (key, request_hash) VALUES (request_key, digest) ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT k.request_hash, k.response INTO known FROM handwritten.idempotency_keys k WHERE k.key = request_key;
    IF known.request_hash <> digest THEN
      RAISE EXCEPTION 'key % was used for another request', request_key;
    END IF;
    RETURN known.response;
  END IF;

  INSERT INTO handwritten.orders (customer, amount, items)
  VALUES (request ->> 'customer', (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  INSERT INTO handwritten.outbox (event_key, event_type, ordering_key, payload)
  VALUES (request_key || ':placed', 'order.placed', request ->> 'customer', request),
         (request_key || ':audit', 'audit.order_placed', request ->> 'customer', request);

  answer := jsonb_build_object('order', order_id);
  UPDATE handwritten.idempotency_keys SET response = answer, completed_at = now() WHERE key = request_key;
  RETURN answer;
END
$$;
