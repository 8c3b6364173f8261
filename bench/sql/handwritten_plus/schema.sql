-- The hand-written SQL of (b) for somebody who wants what the reference manual promises: the columns of its views, its
-- look-ups, and cleaning that reads what goes and not the whole table. What is not here: several destinations, retries.
CREATE TABLE idempotency_keys (
  key text NOT NULL,
  scope text NOT NULL DEFAULT '',
  request_hash bytea NOT NULL,
  status text NOT NULL DEFAULT 'in progress',
  response jsonb,
  created_at timestamptz NOT NULL DEFAULT now(),
  completed_at timestamptz,
  -- Set once. An UPDATE that changed it could not be a HOT one, since it is in an index.
  expires_at timestamptz NOT NULL DEFAULT now() + interval '7 days',
  txid xid8,                -- with the answer: a default would cost a replay, which writes nothing, a transaction id
  -- The look-up of a request, and what makes it one at a time. A key means something within its scope.
  PRIMARY KEY (key, scope)
);
-- Cleaning: DELETE … WHERE expires_at <= now(), some at a time. Without it each time is a sequential scan.
CREATE INDEX idempotency_keys_expires_at ON idempotency_keys (expires_at);

CREATE TABLE outbox (
  -- The order of claiming. Cleaning goes from the oldest id on and needs no index on sent_at.
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  txid xid8 NOT NULL DEFAULT pg_current_xact_id(),
  scope text NOT NULL DEFAULT '',
  idempotency_key text,
  event_key text NOT NULL,
  event_type text NOT NULL,
  ordering_key text,
  payload jsonb,
  headers jsonb,
  created_at timestamptz NOT NULL DEFAULT now(),
  sent_at timestamptz
);
-- An event key names one event within its scope.
CREATE UNIQUE INDEX outbox_event_key ON outbox (event_key, scope);
-- The claim: without it each one reads past all that was sent.
CREATE INDEX outbox_unsent ON outbox (id) WHERE sent_at IS NULL;
-- The events of a request: SELECT … WHERE txid = (SELECT txid FROM idempotency_keys WHERE key = …). A transaction id is
-- the cheapest that finds them; an index on idempotency_key would be larger, and written everywhere instead of at its end.
CREATE INDEX outbox_txid ON outbox (txid);

-- After a conflict only: the same event again is none, another one of its name is refused.
CREATE FUNCTION check_same_event(request_key text, event text, kind text, about text, body jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM handwritten_plus.outbox o
    WHERE o.event_key = event AND o.scope = ''
      AND (o.idempotency_key, o.event_type, o.ordering_key, o.payload::text) IS NOT DISTINCT FROM (request_key, kind, about, body::text);
  IF NOT FOUND THEN
    RAISE EXCEPTION 'event key % was used for another event', event;
  END IF;
END
$$;

CREATE FUNCTION place_order(request_key text, digest bytea, request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  known record;
  customer constant text := request ->> 'customer';
  order_id bigint;
  answer jsonb;
BEGIN
  INSERT INTO handwritten_plus.idempotency_keys (key, request_hash) VALUES (request_key, digest)
    ON CONFLICT (key, scope) DO NOTHING;
  IF NOT FOUND THEN
    SELECT k.request_hash, k.response, k.expires_at INTO known
      FROM handwritten_plus.idempotency_keys k WHERE k.key = request_key AND k.scope = '';
    IF known.expires_at > clock_timestamp() THEN
      IF known.request_hash <> digest THEN
        RAISE EXCEPTION 'key % was used for another request', request_key;
      END IF;
      RETURN known.response;
    END IF;
    -- It counts as new. Of two that find it so, the second one waits here and finds that it does not any more.
    UPDATE handwritten_plus.idempotency_keys k
       SET request_hash = digest, status = 'in progress', response = NULL, created_at = now(), completed_at = NULL,
           expires_at = now() + interval '7 days'
     WHERE k.key = request_key AND k.scope = '' AND k.expires_at <= clock_timestamp();
    IF NOT FOUND THEN
      RETURN handwritten_plus.place_order(request_key, digest, request);
    END IF;
  END IF;

  INSERT INTO handwritten_plus.orders (customer, amount, items)
  VALUES (customer, (request ->> 'amount')::numeric, request ->> 'items') RETURNING id INTO order_id;

  INSERT INTO handwritten_plus.outbox (idempotency_key, event_key, event_type, ordering_key, payload)
  VALUES (request_key, request_key || ':placed', 'order.placed', customer, request)
    ON CONFLICT (event_key, scope) DO NOTHING;
  IF NOT FOUND THEN
    PERFORM handwritten_plus.check_same_event(request_key, request_key || ':placed', 'order.placed', customer, request);
  END IF;
  INSERT INTO handwritten_plus.outbox (idempotency_key, event_key, event_type, ordering_key, payload)
  VALUES (request_key, request_key || ':audit', 'audit.order_placed', customer, request)
    ON CONFLICT (event_key, scope) DO NOTHING;
  IF NOT FOUND THEN
    PERFORM handwritten_plus.check_same_event(request_key, request_key || ':audit', 'audit.order_placed', customer, request);
  END IF;

  answer := jsonb_build_object('order', order_id);
  UPDATE handwritten_plus.idempotency_keys SET status = 'completed', response = answer, completed_at = now(),
         txid = pg_current_xact_id()
   WHERE key = request_key AND scope = '';
  RETURN answer;
END
$$;
