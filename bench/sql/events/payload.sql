CREATE FUNCTION event_payload(number bigint) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN jsonb_build_object('number', number, 'items', repeat('x', 166));   -- 200 bytes as text
