-- idem_run: digest, begin, handler and complete in one call.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate
CREATE TABLE public.idem_payments (id int GENERATED ALWAYS AS IDENTITY, amount numeric);
CREATE FUNCTION public.idem_pay(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
  INSERT INTO public.idem_payments (amount) VALUES ((request ->> 'amount')::numeric) RETURNING to_jsonb(idem_payments)
$$;
CREATE FUNCTION public.idem_pay_pl(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  payment public.idem_payments;
BEGIN
  INSERT INTO public.idem_payments (amount) VALUES ((request ->> 'amount')::numeric) RETURNING * INTO payment;
  RETURN to_jsonb(payment);
END
$$;
SELECT idem_run('sql', '{"amount": 1.50, "to": "x"}', 'public.idem_pay(jsonb)');
SELECT idem_run('sql', '{"to":"x","amount":1.50}', 'public.idem_pay(jsonb)');
SELECT idem_run('sql', '{"amount": 1.5, "to": "x"}', 'public.idem_pay(jsonb)');
SELECT idem_run('pl', '{"amount": 2}', 'public.idem_pay_pl(jsonb)');
SELECT idem_run('pl', '{"amount": 2}', 'public.idem_pay_pl(jsonb)');
SELECT idem_run('pl', '{"amount": 2}', 'public.idem_pay_pl(jsonb)', 'another scope');
-- Names resolve as the caller's.
SET search_path = public;
SELECT retrysafe.idem_run('path', '{"amount": 3}', 'idem_pay(jsonb)');
SET search_path = retrysafe, public;
-- The rest of the transaction is the caller's.
BEGIN;
SELECT idem_run('rolled back', '{"amount": 4}', 'public.idem_pay(jsonb)') ->> 'amount';
ROLLBACK;
SELECT outcome FROM idem_peek('rolled back');
-- A handler that fails leaves no trace.
SELECT idem_run('bad', '{"amount": "x"}', 'public.idem_pay(jsonb)');
SELECT outcome FROM idem_peek('bad');
-- No answer
CREATE FUNCTION public.idem_nothing(jsonb) RETURNS jsonb LANGUAGE sql STRICT AS 'SELECT null::jsonb';
SELECT idem_run('nothing', '{}', 'public.idem_nothing(jsonb)') IS NULL AS first, idem_run('nothing', '{}', 'public.idem_nothing(jsonb)') IS NULL AS again;
SELECT outcome, response IS NULL AS none, status FROM idem_peek('nothing');
-- Handlers can use keys of their own, and cannot run the same key again.
CREATE FUNCTION public.idem_outer(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
  SELECT jsonb_build_object('inner', retrysafe.idem_run('inner', request, 'public.idem_pay(jsonb)'))
$$;
SELECT idem_run('outer', '{"amount": 5}', 'public.idem_outer(jsonb)') #>> '{inner,amount}';
SELECT idem_run('inner', '{"amount": 6}', 'public.idem_outer(jsonb)');
SELECT idem_run('inner2', '{"amount": 6}', 'public.idem_outer(jsonb)');
CREATE FUNCTION public.idem_again(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
  SELECT retrysafe.idem_run('again', request, 'public.idem_again(jsonb)')
$$;
SELECT idem_run('again', '{}', 'public.idem_again(jsonb)');
SELECT count(*) FROM public.idem_payments;
SELECT count(idem_forget(key, scope)) > 0 AS cleaned FROM idempotency_records;
DROP FUNCTION public.idem_pay, public.idem_pay_pl, public.idem_nothing, public.idem_outer, public.idem_again;
DROP TABLE public.idem_payments;
