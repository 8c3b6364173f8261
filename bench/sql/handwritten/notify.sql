-- What wakes a relay up that LISTENs.
CREATE FUNCTION handwritten.notify_relay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('outbox', '');
  RETURN NULL;
END
$$;
CREATE TRIGGER notify_relay AFTER INSERT ON handwritten.outbox FOR EACH STATEMENT EXECUTE FUNCTION handwritten.notify_relay();
