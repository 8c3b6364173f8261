-- retrysafe: the tables.
--
-- Everything that happens per request or per event is append-only: one row in, never updated. All tables and the
-- id sequence are marked for dump, and nothing here puts a row into them.
--
-- There are no foreign keys between them: a parallel restore loads the tables of an extension in any order.

\echo Use "CREATE EXTENSION retrysafe" to load this file. \quit

-- The server puts the target schema on the path. Whoever may create objects there could leave an operator or a
-- function that fits better than the server's own, to be run by this script or bound into what it creates.
SET LOCAL search_path = pg_catalog, pg_temp;

-- One row per finished request. Owning a key while the work is under way is a lock, not a row. The rows are in the
-- tables that inherit from this one: in a ring (below), and those with a ttl of their own in a table that is cleaned
-- row by row. A key can have several rows; only one of them is alive.
CREATE TABLE @extschema@.idem_records (
  key           text COLLATE "C" NOT NULL,
  scope         text COLLATE "C" NOT NULL,
  request_hash  bytea NOT NULL,
  status        text NOT NULL,
  response_json jsonb,
  created_at    timestamptz NOT NULL,
  completed_at  timestamptz NOT NULL,
  expires_at    timestamptz NOT NULL,
  txid          xid8 NOT NULL          -- that did the work: by it the events of the request are found in the log
);
CREATE TABLE @extschema@.idem_records_with_ttl (
  CONSTRAINT idem_records_with_ttl_pkey PRIMARY KEY (key, scope)
) INHERITS (@extschema@.idem_records);
CREATE INDEX idem_records_with_ttl_expires_at ON @extschema@.idem_records_with_ttl (expires_at);

-- Events a consumer has seen.
CREATE TABLE @extschema@.inbox_messages (
  consumer text COLLATE "C" NOT NULL,
  event_id text COLLATE "C" NOT NULL,
  seen_at  timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  CONSTRAINT inbox_messages_pkey PRIMARY KEY (consumer, event_id)
);
CREATE INDEX inbox_messages_seen_at ON @extschema@.inbox_messages (seen_at);

-- The log of events, a ring. `id` is a position, handed out before commit; readers go by `txid` (see docs/architecture.md).
-- CACHE 1: the reader relies on positions that are drawn in order.
CREATE SEQUENCE @extschema@.outbox_log_id_seq AS bigint CACHE 1;
CREATE TABLE @extschema@.outbox_log (
  id              bigint NOT NULL,       -- the columns of fixed width first: no padding
  txid            xid8 NOT NULL,
  created_at      timestamptz NOT NULL,
  deliver_after   timestamptz,           -- of an event that was delayed: it is here since then, and not since it was emitted
  event_number    integer,               -- within the request; its event key is the text IDEMPOTENCY_KEY~NUMBER
  scope           text COLLATE "C" NOT NULL,
  idempotency_key text COLLATE "C",
  event_key       text COLLATE "C",      -- null: the event has a number
  event_type      text COLLATE "C" NOT NULL,
  ordering_key    text COLLATE "C",
  payload         jsonb,
  headers         jsonb,
  CONSTRAINT outbox_log_key_or_number CHECK (
    CASE WHEN event_number IS NULL THEN event_key IS NOT NULL
         ELSE event_key IS NULL AND idempotency_key IS NOT NULL END)
);

-- Events that are not due yet. Workers and fetches move due ones into the log, where they get their position.
CREATE TABLE @extschema@.outbox_scheduled (
  deliver_after   timestamptz NOT NULL,
  created_at      timestamptz NOT NULL,
  request         xid8 NOT NULL DEFAULT '0', -- the transaction that gave the number, since another one may give it again
  event_number    integer,               -- as in the log; null: there is one event of the event key, of request 0
  scope           text COLLATE "C" NOT NULL,
  idempotency_key text COLLATE "C",
  event_key       text COLLATE "C" NOT NULL, -- of a numbered event too: it is cancelled by that text
  event_type      text COLLATE "C" NOT NULL,
  ordering_key    text COLLATE "C",
  payload         jsonb,
  headers         jsonb
);
CREATE UNIQUE INDEX outbox_scheduled_event_key ON @extschema@.outbox_scheduled (event_key, scope, request);
-- Where there is a publication of all tables the server lets nobody remove rows that nothing tells apart.
ALTER TABLE @extschema@.outbox_scheduled REPLICA IDENTITY USING INDEX outbox_scheduled_event_key;
CREATE INDEX outbox_scheduled_deliver_after ON @extschema@.outbox_scheduled (deliver_after, created_at);
-- Whether an event is the next of its ordering key.
CREATE INDEX outbox_scheduled_ordering_key ON @extschema@.outbox_scheduled (ordering_key, deliver_after, created_at)
 WHERE ordering_key IS NOT NULL;

-- Which log this is, and in which cluster and database its snapshots and positions mean something.
CREATE TABLE @extschema@.outbox_eras (
  era               integer NOT NULL,
  log               uuid NOT NULL,
  first_id          bigint NOT NULL,     -- positions from here on were drawn in this era
  system_identifier bigint NOT NULL,
  database          oid NOT NULL,
  extension         oid NOT NULL,        -- another one after a dump was restored over the same database
  timeline          integer NOT NULL,
  restore_mark      text,                -- the restore that this era consented to, see docs/operations.md
  started_at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  CONSTRAINT outbox_eras_pkey PRIMARY KEY (era)
);

-- Kinds that other packages brought; the built-in ones are in the library.
CREATE TABLE @extschema@.outbox_kinds (
  kind    text COLLATE "C" NOT NULL,
  library text NOT NULL,
  options jsonb NOT NULL,
  CONSTRAINT outbox_kinds_pkey PRIMARY KEY (kind)
);

CREATE TABLE @extschema@.outbox_destinations (
  destination  integer GENERATED ALWAYS AS IDENTITY,
  name         text COLLATE "C" NOT NULL,
  kind         text COLLATE "C" NOT NULL,
  options      jsonb NOT NULL,           -- may hold secrets: no view shows it as it is
  event_types  text[],                   -- null: all
  shards       integer NOT NULL,
  max_attempts integer NOT NULL,
  backoff      interval NOT NULL,
  backoff_max  interval NOT NULL,
  on_exhausted text NOT NULL,            -- dead_letter | block
  batch_events integer NOT NULL,
  batch_bytes  integer NOT NULL,
  lease        interval NOT NULL,
  workers      boolean NOT NULL,         -- false: left to pull clients and relays; so for kind pull
  paused       boolean NOT NULL DEFAULT false,
  lost_at      timestamptz,              -- when it held back too much of the log; it is paused for good then
  run_as       text,                     -- the role that made it: options are its own; null for kind pull
  created_at   timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  CONSTRAINT outbox_destinations_pkey PRIMARY KEY (destination),
  CONSTRAINT outbox_destinations_name UNIQUE (name)
);

-- What is in these two decides which code workers run, as which role, and where secrets go. Being allowed to write to all
-- tables, as members of pg_write_all_data are, must not lead there. What a subscription
-- writes fires no triggers but those that are ALWAYS enabled, and for rows or for TRUNCATE.
CREATE FUNCTION @extschema@.outbox_only_the_owner_writes() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF NOT pg_catalog.pg_has_role(current_user, (SELECT relowner FROM pg_catalog.pg_class WHERE oid = TG_RELID), 'USAGE') THEN
    RAISE EXCEPTION 'permission denied for table %', TG_TABLE_NAME
      USING ERRCODE = 'insufficient_privilege', HINT = 'Use the functions of retrysafe for destinations and kinds.';
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  RETURN NEW;
END
$$;
COMMENT ON FUNCTION @extschema@.outbox_only_the_owner_writes()
IS 'keeps everybody but the owner of the extension from writing to a table, whatever rights they have';
DO $$
DECLARE
  guarded text;
BEGIN
  FOREACH guarded IN ARRAY ARRAY['outbox_destinations', 'outbox_kinds'] LOOP
    EXECUTE pg_catalog.format($q$
      CREATE TRIGGER only_the_owner_writes BEFORE INSERT OR UPDATE OR DELETE ON @extschema@.%1$I
        FOR EACH ROW EXECUTE FUNCTION @extschema@.outbox_only_the_owner_writes();
      CREATE TRIGGER only_the_owner_truncates BEFORE TRUNCATE ON @extschema@.%1$I
        FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.outbox_only_the_owner_writes();
      ALTER TABLE @extschema@.%1$I ENABLE ALWAYS TRIGGER only_the_owner_writes,
        ENABLE ALWAYS TRIGGER only_the_owner_truncates$q$, guarded);
  END LOOP;
END
$$;

-- Who works a shard. A new row version per claim and per back-off, not per batch.
CREATE TABLE @extschema@.outbox_shards (
  destination integer NOT NULL,
  shard       integer NOT NULL,
  token       bigint NOT NULL DEFAULT 0, -- fencing token: grows with every change of holder
  holder      text,                      -- null: free
  holder_pid  integer,                   -- of a worker, whose death frees the shard at once; null for pull clients
  timeline    integer NOT NULL DEFAULT 0,-- of the server when it was claimed: a promotion frees the shard at once
  lease_until timestamptz,
  failures    integer NOT NULL DEFAULT 0,-- times in a row that the destination was unreachable
  retry_at    timestamptz,               -- back-off of the whole shard
  last_error  text,
  error_at    timestamptz,
  CONSTRAINT outbox_shards_pkey PRIMARY KEY (destination, shard)
) WITH (fillfactor = 50);

-- The ring of progress: windows and batches, which turn together.

-- A window is what its snapshot sees and the snapshot of the window before does not. Window 0 is where the
-- destination started. Written once per window.
CREATE TABLE @extschema@.outbox_windows (
  destination integer NOT NULL,
  shard       integer NOT NULL,
  window_no   bigint NOT NULL,
  era         integer NOT NULL,
  floor       bigint NOT NULL,           -- last position drawn before the snapshot
  snapshot    pg_snapshot NOT NULL,
  next        xid8 NOT NULL,             -- next transaction id, read after the snapshot
  ceiling     bigint NOT NULL,           -- last position drawn after the snapshot
  taken_at    timestamptz NOT NULL,
  resumed_at  bigint                     -- how far the window before it had been read; null: to its end
);

-- Progress, append-only: the newest row of a shard is its cursor, older ones are the record of deliveries.
CREATE TABLE @extschema@.outbox_batches (
  destination     integer NOT NULL,
  shard           integer NOT NULL,
  seq             bigint NOT NULL,
  window_no       bigint NOT NULL,
  position        bigint NOT NULL,       -- all of the window up to here is recorded
  token           bigint NOT NULL,
  delivered       integer NOT NULL,      -- of this batch
  parked          integer NOT NULL,
  total_delivered bigint NOT NULL,       -- of the shard so far
  total_parked    bigint NOT NULL,
  published_at    timestamptz NOT NULL
);

-- Rings. Each of these tables is a parent without rows; the rows are in its three pieces, one of which takes the new
-- ones. A piece in which nothing is needed any more is emptied by TRUNCATE. See src/storage/README.md.
DO $$
DECLARE
  parent text;
  pkey   text;
  piece  integer;
BEGIN
  FOR parent, pkey IN VALUES ('idem_records', 'key, scope'), ('outbox_log', 'id'),
                             ('outbox_windows', 'destination, shard, window_no'),
                             ('outbox_batches', 'destination, shard, seq') LOOP
    -- It has no rows, but what is removed from the pieces is removed by its name.
    EXECUTE pg_catalog.format('ALTER TABLE @extschema@.%I REPLICA IDENTITY FULL', parent);
    FOR piece IN 1..3 LOOP
      -- Rows are only added, and the piece goes as a whole: vacuuming it because of insertions would be for nothing.
      EXECUTE pg_catalog.format(
        'CREATE TABLE @extschema@.%1$I (CONSTRAINT %2$I PRIMARY KEY (%3$s)) INHERITS (@extschema@.%4$I) '
        'WITH (autovacuum_vacuum_insert_threshold = -1)',
        parent || '_' || piece, parent || '_pkey_' || piece, pkey, parent);
      IF parent = 'outbox_log' THEN
        -- Numbered events need no entry: one transaction commits the work of an idempotency key.
        EXECUTE pg_catalog.format('CREATE UNIQUE INDEX %I ON @extschema@.%I (event_key, scope) WHERE event_key IS NOT NULL',
                       'outbox_log_event_key_' || piece, parent || '_' || piece);
        EXECUTE pg_catalog.format('CREATE INDEX %I ON @extschema@.%I (txid, id)',
                       'outbox_log_txid_' || piece, parent || '_' || piece);
      END IF;
    END LOOP;
  END LOOP;
END
$$;

-- What becomes of the pieces of the rings. The highest generation of a ring takes the new rows; before the first
-- row is here, that is generation 1. A generation lives in piece (generation - 1) % 3 + 1, and its row goes when the
-- piece is emptied. Whoever chooses a piece holds a lock on this table meanwhile.
CREATE TABLE @extschema@.ring_pieces (
  ring            text COLLATE "C" NOT NULL, -- records | log | progress
  generation      bigint NOT NULL,
  since           timestamptz NOT NULL,      -- writers choose it from then on
  since_position  bigint NOT NULL,           -- last position of the log that was drawn by then
  sealed_at       timestamptz,               -- when its last writer was found gone
  sealed_position bigint,                    -- a position of the log that was drawn after that
  needed_until    timestamptz,               -- records: when the last one expires
  retired         boolean NOT NULL DEFAULT false, -- nobody looks into it any more
  CONSTRAINT ring_pieces_pkey PRIMARY KEY (ring, generation)
);

-- The exceptions: events that failed at a destination, and those that wait behind them for the sake of order.
-- Each carries its own copy of the event and holds back no part of the log. Of an ordering key only the event with the
-- smallest id is `retry`; the others are `blocked` until it is settled (see src/outbox/README.md). Rows change under
-- the lock of their shard row only.
CREATE TABLE @extschema@.outbox_parked (
  destination     integer NOT NULL,
  shard           integer NOT NULL,
  id              bigint NOT NULL,       -- position in the log; order of delivery within an ordering key
  state           text NOT NULL,         -- retry | blocked | dead | delivered | discarded
  attempts        integer NOT NULL,
  given_back      integer NOT NULL DEFAULT 0, -- times it was handed out and, for its key's sake, given back untried
  retry_at        timestamptz,
  reason          text,
  parked_at       timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  settled_at      timestamptz,           -- when it became dead, delivered or discarded
  txid            xid8 NOT NULL,
  created_at      timestamptz NOT NULL,
  deliver_after   timestamptz,           -- as in the log
  scope           text COLLATE "C" NOT NULL,
  idempotency_key text COLLATE "C",
  event_key       text COLLATE "C" NOT NULL,
  event_type      text COLLATE "C" NOT NULL,
  ordering_key    text COLLATE "C",
  payload         jsonb,
  headers         jsonb,
  CONSTRAINT outbox_parked_pkey PRIMARY KEY (destination, shard, id)
);
CREATE INDEX outbox_parked_due ON @extschema@.outbox_parked (destination, shard, retry_at) WHERE state = 'retry';
CREATE INDEX outbox_parked_waiting ON @extschema@.outbox_parked (destination, shard, ordering_key, id)
  WHERE state IN ('retry', 'blocked');
CREATE INDEX outbox_parked_retry ON @extschema@.outbox_parked (destination, shard, ordering_key, id) WHERE state = 'retry';
CREATE INDEX outbox_parked_dead ON @extschema@.outbox_parked (destination, shard, ordering_key, id) WHERE state = 'dead';
CREATE INDEX outbox_parked_settled ON @extschema@.outbox_parked (settled_at) WHERE state IN ('delivered', 'discarded');

DO $$
DECLARE
  relation pg_catalog.regclass;
BEGIN
  FOR relation IN
    SELECT c.oid
      FROM pg_catalog.pg_class c
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
      JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid
                                    AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass
     WHERE e.extname = 'retrysafe' AND d.deptype = 'e' AND c.relkind IN ('r', 'S')
  LOOP
    PERFORM pg_catalog.pg_extension_config_dump(relation, '');
  END LOOP;
END
$$;
-- Idempotent writes, and the inbox of consumers.

-- Beginning a key. The digest of the request comes as bytes, or as text: then an untyped literal means text.
CREATE FUNCTION @extschema@.idem_begin(
  key text, request_hash bytea, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept bytea[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_begin';
COMMENT ON FUNCTION @extschema@.idem_begin(text, bytea, text, interval, bytea[]) IS
  'Begins a request: new (do the work, then idem_complete), replay (here is the saved answer) or conflict; waits for a concurrent owner.';

CREATE FUNCTION @extschema@.idem_begin(
  key text, request_hash text, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept text[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_begin_text';
COMMENT ON FUNCTION @extschema@.idem_begin(text, text, text, interval, text[]) IS
  'The same with the digest as text: its UTF-8 bytes, or after \x bytes in hexadecimal.';

CREATE FUNCTION @extschema@.idem_try_begin(
  key text, request_hash bytea, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept bytea[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_try_begin';
COMMENT ON FUNCTION @extschema@.idem_try_begin(text, bytea, text, interval, bytea[]) IS
  'Like idem_begin, but never waits: in_progress when another transaction owns the key.';

CREATE FUNCTION @extschema@.idem_try_begin(
  key text, request_hash text, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept text[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_try_begin_text';
COMMENT ON FUNCTION @extschema@.idem_try_begin(text, text, text, interval, text[]) IS
  'Like idem_begin, but never waits; the digest as text.';

CREATE FUNCTION @extschema@.idem_complete(
  key text, response jsonb DEFAULT NULL, scope text DEFAULT '', status text DEFAULT 'completed')
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_complete';
COMMENT ON FUNCTION @extschema@.idem_complete(text, jsonb, text, text) IS
  'Saves the answer of a key that this transaction began; status failed saves a failure that every retry sees again.';

CREATE FUNCTION @extschema@.idem_run(key text, request jsonb, handler regprocedure, scope text DEFAULT '')
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_run';
COMMENT ON FUNCTION @extschema@.idem_run(text, jsonb, regprocedure, text) IS
  'Answers a request: calls handler(request) and saves its result the first time, returns the saved one afterwards.';

-- No overload: an untyped literal would resolve to text, and its white space would count.
CREATE FUNCTION @extschema@.idem_hash(request jsonb)
RETURNS bytea LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_hash';
COMMENT ON FUNCTION @extschema@.idem_hash(jsonb) IS
  'SHA-256 of a request, whatever the order of its keys: the same as sha256(convert_to(request::text, ''UTF8'')).';

-- Only one of the two has a default digest, so that idem_peek('key') is not ambiguous.
CREATE FUNCTION @extschema@.idem_peek(
  key text, request_hash bytea DEFAULT NULL, scope text DEFAULT '',
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'retrysafe_idem_peek';
COMMENT ON FUNCTION @extschema@.idem_peek(text, bytea, text) IS
  'Looks a key up without owning it: replay, conflict, in_progress or unknown.';

CREATE FUNCTION @extschema@.idem_peek(
  key text, request_hash text, scope text DEFAULT '', OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'retrysafe_idem_peek_text';
COMMENT ON FUNCTION @extschema@.idem_peek(text, text, text) IS
  'Looks a key up without owning it; the digest as text.';

CREATE FUNCTION @extschema@.idem_forget(key text, scope text DEFAULT '')
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_forget';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text) IS
  'Removes the saved answer of a key, which then counts as new; false when there is none.';

CREATE FUNCTION @extschema@.idem_cleanup(max_rows integer DEFAULT 10000)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_cleanup';
COMMENT ON FUNCTION @extschema@.idem_cleanup(integer) IS
  'Removes up to max_rows expired answers and as many expired inbox messages; returns how many.';

CREATE FUNCTION @extschema@.inbox_accept(consumer text, event_id text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_inbox_accept';
COMMENT ON FUNCTION @extschema@.inbox_accept(text, text) IS
  'True the first time a consumer has this event, and false for every later copy.';

-- A set and not an array: as an array it would be called again for each row it is compared with.
CREATE FUNCTION @extschema@.inbox_accept(consumer text, event_ids text[])
RETURNS SETOF text LANGUAGE c VOLATILE ROWS 100 PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_inbox_accept_all';
COMMENT ON FUNCTION @extschema@.inbox_accept(text, text[]) IS
  'The ids among event_ids that this consumer has not had before, each once.';

-- One row per key: the live one, or else the last, until it is removed.
CREATE VIEW @extschema@.idempotency_records AS
SELECT DISTINCT ON (key, scope)
       key, scope, request_hash, status, response_json, created_at, completed_at, expires_at, txid
  FROM @extschema@.idem_records
 ORDER BY key, scope, expires_at DESC;
COMMENT ON VIEW @extschema@.idempotency_records IS 'The saved answers; one that has expired counts as absent.';

-- Counts are estimates, or stop at 10000: an operator's look costs the same however many records there are.
-- Locks with this objsubid are the claims on keys.
CREATE VIEW @extschema@.idem_status AS
WITH clock AS MATERIALIZED (
  SELECT pg_catalog.clock_timestamp() AS now,
         pg_catalog.current_setting('retrysafe.inbox_retention', true)::interval AS inbox_retention
), claims AS MATERIALIZED (
  SELECT pg_catalog.count(*) FILTER (WHERE granted) AS held, pg_catalog.count(*) FILTER (WHERE NOT granted) AS waiting
    FROM pg_catalog.pg_locks
   WHERE locktype = 'advisory' AND objsubid = 21075
     AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
), records AS MATERIALIZED (
  SELECT pg_catalog.sum(GREATEST(c.reltuples, 0))::bigint AS estimate,
         pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid))::bigint AS bytes
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE i.inhparent = '@extschema@.idem_records'::pg_catalog.regclass
)
SELECT claims.held AS keys_in_progress,
       claims.waiting AS sessions_waiting,
       records.estimate AS records_estimate,
       records.bytes AS records_bytes,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM @extschema@.idem_records_with_ttl
                                          WHERE expires_at <= clock.now LIMIT 10000) AS r) AS records_expired,
       (SELECT pg_catalog.min(expires_at) FROM @extschema@.idem_records_with_ttl) AS oldest_record_expires_at,
       (SELECT GREATEST(reltuples, 0)::bigint FROM pg_catalog.pg_class
         WHERE oid = '@extschema@.inbox_messages'::pg_catalog.regclass) AS inbox_estimate,
       pg_catalog.pg_total_relation_size('@extschema@.inbox_messages'::pg_catalog.regclass) AS inbox_bytes,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM @extschema@.inbox_messages
                                          WHERE seen_at <= clock.now - clock.inbox_retention LIMIT 10000) AS m)
         AS inbox_expired,
       (SELECT pg_catalog.min(seen_at) FROM @extschema@.inbox_messages) AS oldest_inbox_message_seen_at
  FROM clock, claims, records;
COMMENT ON VIEW @extschema@.idem_status IS
  'Keys in progress, saved answers and inbox messages, and what waits for idem_cleanup row by row (counted up to 10000).';
-- Writing events.

CREATE FUNCTION @extschema@.outbox_emit(
  key text, event_key text, event_type text, payload jsonb, ordering_key text DEFAULT NULL, headers jsonb DEFAULT NULL,
  deliver_after timestamptz DEFAULT NULL, scope text DEFAULT '')
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_emit';
COMMENT ON FUNCTION @extschema@.outbox_emit IS
  'Appends an event in this transaction and returns its position, null for a delayed event.';

CREATE FUNCTION @extschema@.outbox_cancel(event_key text, scope text DEFAULT '')
RETURNS boolean LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_cancel';
COMMENT ON FUNCTION @extschema@.outbox_cancel IS
  'Removes a delayed event that is not in the log yet; false when there is none.';

CREATE FUNCTION @extschema@.outbox_event_id(event_key text, scope text DEFAULT '')
RETURNS uuid LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'retrysafe_outbox_event_id';
COMMENT ON FUNCTION @extschema@.outbox_event_id IS
  'The id under which the event of this key is published; null before the log has its identity.';
-- Destinations and kinds.

CREATE FUNCTION @extschema@.outbox_create_destination(
  name text, kind text, options jsonb DEFAULT '{}', start_at text DEFAULT 'now', event_types text[] DEFAULT NULL,
  shards integer DEFAULT 1, max_attempts integer DEFAULT 10, backoff interval DEFAULT '1 second',
  backoff_max interval DEFAULT '10 minutes', on_exhausted text DEFAULT 'dead_letter',
  batch_events integer DEFAULT 500, batch_bytes integer DEFAULT 4194304, lease interval DEFAULT '30 seconds',
  workers boolean DEFAULT true)
RETURNS integer LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_create_destination';
COMMENT ON FUNCTION @extschema@.outbox_create_destination(
  text, text, jsonb, text, text[], integer, integer, interval, interval, text, integer, integer, interval, boolean)
IS 'makes a destination that events are published to; start_at is now, earliest or a position';

CREATE FUNCTION @extschema@.outbox_alter_destination(
  name text, options jsonb DEFAULT NULL, event_types text[] DEFAULT NULL, shards integer DEFAULT NULL,
  max_attempts integer DEFAULT NULL, backoff interval DEFAULT NULL, backoff_max interval DEFAULT NULL,
  on_exhausted text DEFAULT NULL, batch_events integer DEFAULT NULL, batch_bytes integer DEFAULT NULL,
  lease interval DEFAULT NULL, workers boolean DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_alter_destination';
COMMENT ON FUNCTION @extschema@.outbox_alter_destination(
  text, jsonb, text[], integer, integer, interval, interval, text, integer, integer, interval, boolean)
IS 'changes a destination; null leaves a value as it is, options are merged and null removes one, empty event_types mean all';

CREATE FUNCTION @extschema@.outbox_drop_destination(name text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_drop_destination';
COMMENT ON FUNCTION @extschema@.outbox_drop_destination(text)
IS 'drops a destination with its progress and dead letters; false when there is none of that name';

CREATE FUNCTION @extschema@.outbox_pause(name text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_pause';
COMMENT ON FUNCTION @extschema@.outbox_pause(text)
IS 'stops publishing to a destination until outbox_resume';

CREATE FUNCTION @extschema@.outbox_resume(name text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_resume';
COMMENT ON FUNCTION @extschema@.outbox_resume(text)
IS 'publishes to a paused destination again, and ends a back-off';

CREATE FUNCTION @extschema@.outbox_register_kind(kind text, library text, options jsonb)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_register_kind';
COMMENT ON FUNCTION @extschema@.outbox_register_kind(text, text, jsonb)
IS 'makes a kind of destination known whose sink is in the named library (superuser)';

CREATE FUNCTION @extschema@.outbox_unregister_kind(kind text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_unregister_kind';
COMMENT ON FUNCTION @extschema@.outbox_unregister_kind(text)
IS 'forgets a registered kind that no destination uses (superuser)';

CREATE FUNCTION @extschema@.outbox_redacted_options(kind text, options jsonb)
RETURNS jsonb LANGUAGE c STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_redacted_options';
COMMENT ON FUNCTION @extschema@.outbox_redacted_options(text, jsonb)
IS 'options of a destination without what must not be shown, for the views';

CREATE FUNCTION @extschema@.outbox_built_in_kinds()
RETURNS TABLE (kind text, library text) LANGUAGE c STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_built_in_kinds';
COMMENT ON FUNCTION @extschema@.outbox_built_in_kinds()
IS 'the kinds of destinations that come with the extension, and the library that delivers to each';

CREATE FUNCTION @extschema@.outbox_options_of_kind(kind text)
RETURNS TABLE (option text, type text, required boolean, "default" text, min bigint, max bigint, choices text,
               description text)
LANGUAGE c STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_options_of_kind';
COMMENT ON FUNCTION @extschema@.outbox_options_of_kind(text)
IS 'the options that destinations of a kind take';

CREATE FUNCTION @extschema@.outbox_retry(
  destination text, event_type text DEFAULT NULL, ordering_key text DEFAULT NULL, event_id uuid DEFAULT NULL,
  reason_like text DEFAULT NULL, max_events bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_retry';
COMMENT ON FUNCTION @extschema@.outbox_retry(text, text, text, uuid, text, bigint)
IS 'sends dead letters again that match all given filters, in order; returns how many';

CREATE FUNCTION @extschema@.outbox_discard(
  destination text, event_type text DEFAULT NULL, ordering_key text DEFAULT NULL, event_id uuid DEFAULT NULL,
  reason_like text DEFAULT NULL, max_events bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_discard';
COMMENT ON FUNCTION @extschema@.outbox_discard(text, text, text, uuid, text, bigint)
IS 'gives up dead letters that match all given filters; returns how many';
-- Eras: consent to publish in a restored or cloned database.

CREATE FUNCTION @extschema@.outbox_consent(log text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_consent';
COMMENT ON FUNCTION @extschema@.outbox_consent(text)
IS 'lets a restored or cloned database publish: as the same log, or as a fork whose events get new ids';

CREATE FUNCTION @extschema@.outbox_suspended_reason()
RETURNS text LANGUAGE c STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_suspended_reason';
COMMENT ON FUNCTION @extschema@.outbox_suspended_reason()
IS 'why nothing is published in this database; null when publishing goes on';

CREATE FUNCTION @extschema@.outbox_awaits_standby()
RETURNS boolean LANGUAGE c VOLATILE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_awaits_standby';
COMMENT ON FUNCTION @extschema@.outbox_awaits_standby()
IS 'whether the synchronous standbys, for which events wait, are behind at this moment';

CREATE FUNCTION @extschema@.outbox_cleanup(max_rows integer DEFAULT 10000)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_cleanup';
COMMENT ON FUNCTION @extschema@.outbox_cleanup(integer)
IS 'removes what retention does not keep, as workers do by themselves; returns how many rows went';
-- The pull API: publishing from outside the database.

CREATE FUNCTION @extschema@.outbox_fetch(
  destination text, max_events integer DEFAULT 100, max_bytes integer DEFAULT 8388608,
  lease interval DEFAULT '30 seconds')
RETURNS TABLE (
  batch text, event_id uuid, id bigint, attempt integer, event_type text, event_key text, scope text,
  ordering_key text, idempotency_key text, payload jsonb, headers jsonb, created_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_fetch';
COMMENT ON FUNCTION @extschema@.outbox_fetch(text, integer, integer, interval)
IS 'hands out the next events of a destination, to be published within the lease and then acknowledged';

CREATE FUNCTION @extschema@.outbox_ack(batch text, up_to bigint DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_ack';
COMMENT ON FUNCTION @extschema@.outbox_ack(text, bigint)
IS 'records a fetched batch as delivered, or its events up to one; returns how many were recorded';

CREATE FUNCTION @extschema@.outbox_nack(
  batch text, event_id uuid, reason text DEFAULT NULL, retry_after interval DEFAULT NULL, dead boolean DEFAULT false)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_nack';
COMMENT ON FUNCTION @extschema@.outbox_nack(text, uuid, text, interval, boolean)
IS 'gives an event of a batch back as failed; returns how many events of the batch wait now, later ones of its ordering key included';

CREATE FUNCTION @extschema@.outbox_renew(batch text, lease interval DEFAULT '30 seconds')
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_renew';
COMMENT ON FUNCTION @extschema@.outbox_renew(text, interval)
IS 'extends the lease of a batch that takes longer; returns when it ends';

CREATE FUNCTION @extschema@.outbox_release(batch text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_release';
COMMENT ON FUNCTION @extschema@.outbox_release(text)
IS 'ends the lease of a batch: what was not acknowledged is handed out again at once';

CREATE FUNCTION @extschema@.outbox_record(
  batch text, outcomes jsonb DEFAULT NULL, unreachable text DEFAULT NULL, retry_after interval DEFAULT NULL)
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_record';
COMMENT ON FUNCTION @extschema@.outbox_record(text, jsonb, text, interval)
IS 'records what became of a batch, and that its destination was unreachable; returns when to try that again';

CREATE PROCEDURE @extschema@.outbox_wait(destinations text[], timeout interval DEFAULT '30 seconds')
LANGUAGE c
AS 'MODULE_PATHNAME', 'retrysafe_outbox_wait';
COMMENT ON PROCEDURE @extschema@.outbox_wait(text[], interval)
IS 'waits, without a snapshot, until there may be something to fetch';

CREATE FUNCTION @extschema@.outbox_relay_destination(destination text)
RETURNS TABLE (kind text, library text, version text, shards integer, batch_events integer, batch_bytes integer,
               lease_ms bigint, on_exhausted text, paused boolean, database text)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_relay_destination';
COMMENT ON FUNCTION @extschema@.outbox_relay_destination(text)
IS 'how a destination is to be published to by somebody else than a worker; the version changes with any of it';

CREATE FUNCTION @extschema@.outbox_relay_options(destination text)
RETURNS TABLE (option text, value text, source text)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_relay_options';
COMMENT ON FUNCTION @extschema@.outbox_relay_options(text)
IS 'the options of a destination as its sink gets them, secrets included; source: inline, or the file or environment variable to read on the machine of the relay';
-- What operators look at. Depth and age come from the newest batch of each shard: no view but outbox_events and
-- outbox_dead_letters reads events.

CREATE FUNCTION @extschema@.outbox_recorded_at(
  destination integer, shards integer, event_types text[], id bigint, txid xid8, event_type text, ordering_key text)
RETURNS timestamptz LANGUAGE c STABLE PARALLEL UNSAFE -- takes snapshots of its own
AS 'MODULE_PATHNAME', 'retrysafe_outbox_recorded_at';
COMMENT ON FUNCTION @extschema@.outbox_recorded_at(integer, integer, text[], bigint, xid8, text, text)
IS 'when a destination recorded an event; infinity while it has not, null when it does not want it';

CREATE VIEW @extschema@.outbox_events AS
  SELECT l.id,
         @extschema@.outbox_event_id(coalesce(l.event_key, l.idempotency_key || '~' || l.event_number), l.scope) AS event_id,
         l.scope, l.idempotency_key, l.event_key, l.event_number, l.event_type, l.ordering_key, l.payload, l.headers, l.created_at,
         l.deliver_after, l.txid,
         (SELECT nullif(pg_catalog.max(@extschema@.outbox_recorded_at(d.destination, d.shards, d.event_types, l.id, l.txid,
                                                           l.event_type, l.ordering_key)), 'infinity')
            FROM @extschema@.outbox_destinations d) AS sent_at
    FROM @extschema@.outbox_log l;
COMMENT ON VIEW @extschema@.outbox_events
IS 'the log of events; sent_at is when the last destination that wants an event recorded it';
COMMENT ON COLUMN @extschema@.outbox_events.event_number
IS 'of an event that was emitted without an event key; it is published with the event key IDEMPOTENCY_KEY~NUMBER';

CREATE VIEW @extschema@.outbox_scheduled_events AS
  SELECT @extschema@.outbox_event_id(s.event_key, s.scope) AS event_id,
         s.scope, s.idempotency_key, s.event_key, s.event_type, s.ordering_key, s.payload, s.headers, s.created_at,
         s.deliver_after
    FROM @extschema@.outbox_scheduled s;
COMMENT ON VIEW @extschema@.outbox_scheduled_events IS 'events that are not due yet';

CREATE VIEW @extschema@.outbox_dead_letters AS
  SELECT d.name AS destination, p.id,
         @extschema@.outbox_event_id(p.event_key, p.scope) AS event_id,
         p.scope, p.idempotency_key, p.event_key, p.event_type, p.ordering_key, p.payload, p.headers, p.created_at,
         p.reason, p.attempts, p.settled_at AS dead_since
    FROM @extschema@.outbox_parked p JOIN @extschema@.outbox_destinations d USING (destination)
   WHERE p.state = 'dead';
COMMENT ON VIEW @extschema@.outbox_dead_letters
IS 'events that a destination gave up on; see outbox_retry and outbox_discard';

CREATE FUNCTION @extschema@.outbox_passed_position(destination integer, shard integer, by timestamptz DEFAULT 'infinity')
RETURNS bigint LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE -- takes snapshots of its own
AS 'MODULE_PATHNAME', 'retrysafe_outbox_passed_position';
COMMENT ON FUNCTION @extschema@.outbox_passed_position(integer, integer, timestamptz)
IS 'the position of the log up to which a shard had recorded everything, whenever it commits, by a time';

-- The pieces of the rings that hold rows, and what keeps those that take no more of them.
CREATE VIEW @extschema@.ring_status AS
  WITH clock AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS now,
           pg_catalog.current_setting('retrysafe.outbox_retention', true)::interval AS outbox_retention
  ), behind AS MATERIALIZED ( -- up to where the log has been seen by all that a destination has recorded
    SELECT d.name, pg_catalog.min(@extschema@.outbox_passed_position(d.destination, shard)) AS position,
           pg_catalog.min(@extschema@.outbox_passed_position(d.destination, shard, clock.now - clock.outbox_retention))
             AS kept_position -- for retention counts from when it was recorded
      FROM clock
     CROSS JOIN @extschema@.outbox_destinations d
     CROSS JOIN LATERAL pg_catalog.generate_series(0, d.shards - 1) AS shard
     WHERE d.lost_at IS NULL
     GROUP BY d.name
  )
  SELECT p.ring, p.generation, (p.generation - 1) % 3 + 1 AS piece,
         CASE WHEN p.retired THEN 'retired'
              WHEN p.generation = pg_catalog.max(p.generation) OVER (PARTITION BY p.ring) THEN 'active'
              WHEN p.sealed_at IS NOT NULL THEN 'sealed'
              ELSE 'filled' END AS state,
         p.since, p.sealed_at, p.needed_until,
         CASE WHEN p.retired THEN ARRAY['readers']
              WHEN p.generation = pg_catalog.max(p.generation) OVER (PARTITION BY p.ring) THEN NULL
              WHEN p.sealed_at IS NULL THEN ARRAY['writers']
              WHEN p.ring = 'records' AND p.needed_until > clock.now THEN ARRAY['retention']
              WHEN p.ring = 'log' THEN
                CASE WHEN p.sealed_at > clock.now - clock.outbox_retention
                       OR EXISTS (SELECT FROM behind b WHERE b.kept_position < p.sealed_position
                                                         AND b.position >= p.sealed_position)
                  THEN ARRAY['retention'] END
                || (SELECT pg_catalog.array_agg('destination ' || b.name ORDER BY b.name)
                      FROM behind b WHERE b.position < p.sealed_position)
              WHEN p.ring = 'progress' AND p.sealed_position > 1 + coalesce(
                     (SELECT pg_catalog.min(l.since_position) FROM @extschema@.ring_pieces l WHERE l.ring = 'log'), 0)
                THEN ARRAY['log'] END AS held_by,
         size.bytes
    FROM @extschema@.ring_pieces p
   CROSS JOIN clock
   CROSS JOIN LATERAL (
           SELECT pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid))::bigint AS bytes
             FROM (VALUES ('records', '@extschema@.idem_records'::pg_catalog.regclass),
                          ('log', '@extschema@.outbox_log'), ('progress', '@extschema@.outbox_windows'),
                          ('progress', '@extschema@.outbox_batches')) AS r (ring, parent)
             JOIN pg_catalog.pg_class a ON a.oid = r.parent
             JOIN pg_catalog.pg_inherits i ON i.inhparent = r.parent
             JOIN pg_catalog.pg_class c
               ON c.oid = i.inhrelid AND c.relname = a.relname || '_' || ((p.generation - 1) % 3 + 1)
            WHERE r.ring = p.ring) AS size;
COMMENT ON VIEW @extschema@.ring_status
IS 'the pieces of the rings of records, events and progress, and what holds back those that could be emptied';

CREATE VIEW @extschema@.outbox_status AS
  SELECT d.name, d.kind,
         CASE WHEN suspended.reason IS NOT NULL THEN 'suspended'
              WHEN d.lost_at IS NOT NULL THEN 'lost'
              WHEN d.paused THEN 'paused'
              WHEN s.backing_off THEN 'backing off'
              WHEN s.backlog = 0 AND waiting.events = 0 THEN 'idle'
              WHEN s.backlog > 0 AND standby.awaited THEN 'awaiting standby'
              WHEN s.holders IS NULL THEN 'unclaimed'
              ELSE 'publishing' END AS state,
         suspended.reason AS suspended_reason,
         d.paused, d.lost_at,
         s.backlog,
         -- A delayed event is pending from when it is due, also while nobody moves it into the log.
         pg_catalog.clock_timestamp() - least(waiting.oldest, delayed.oldest_due, (
           SELECT greatest(l.deliver_after, l.created_at) FROM @extschema@.outbox_log l WHERE l.id > s.position ORDER BY l.id LIMIT 1
         )) AS oldest_pending_age,
         s.delivered,
         coalesce(held.bytes, 0) AS holds_back_bytes,
         waiting.retry AS parked_retry, waiting.events - waiting.retry AS parked_blocked, dead.events AS dead,
         s.failures, s.retry_at, s.last_error, s.error_at,
         s.holders,
         d.shards, d.event_types,
         @extschema@.outbox_redacted_options(d.kind, d.options) AS options,
         d.max_attempts, d.backoff, d.backoff_max, d.on_exhausted, d.batch_events, d.batch_bytes, d.lease, d.workers,
         d.run_as, d.created_at
    FROM @extschema@.outbox_destinations d
   CROSS JOIN (SELECT CASE WHEN q.is_called THEN q.last_value ELSE q.last_value - 1 END AS position
                 FROM @extschema@.outbox_log_id_seq q) AS log
   CROSS JOIN (SELECT @extschema@.outbox_suspended_reason() AS reason) AS suspended
    -- The first one by index, and then the clock: as a condition that would be asked of each delayed event.
   CROSS JOIN (SELECT (SELECT first.pending_since
                         FROM (SELECT s.deliver_after, greatest(s.deliver_after, s.created_at) AS pending_since
                                 FROM @extschema@.outbox_scheduled s ORDER BY s.deliver_after LIMIT 1) AS first
                        WHERE first.deliver_after <= pg_catalog.clock_timestamp()) AS oldest_due) AS delayed
   CROSS JOIN (SELECT @extschema@.outbox_awaits_standby() AS awaited) AS standby
   CROSS JOIN LATERAL (
           -- Where progress is missing, it is unknown.
           SELECT CASE WHEN pg_catalog.count(*) = d.shards THEN greatest(log.position - pg_catalog.min(b.position), 0) END AS backlog,
                  pg_catalog.min(b.position) AS position,
                  pg_catalog.sum(b.total_delivered)::bigint AS delivered,
                  pg_catalog.max(h.failures) AS failures,
                  pg_catalog.min(h.retry_at) FILTER (WHERE rest.is_on) AS retry_at,
                  pg_catalog.bool_and(rest.is_on) AS backing_off,
                  (pg_catalog.array_agg(h.last_error ORDER BY h.error_at DESC NULLS LAST))[1] AS last_error,
                  pg_catalog.max(h.error_at) AS error_at,
                  pg_catalog.array_agg(DISTINCT h.holder) FILTER (WHERE h.lease_until > pg_catalog.clock_timestamp()) AS holders
             FROM @extschema@.outbox_shards h
             -- One that began later than now, by a clock that was set back since, is over.
            CROSS JOIN LATERAL (SELECT coalesce(h.retry_at > pg_catalog.clock_timestamp()
                                                AND h.error_at <= pg_catalog.clock_timestamp(), false) AS is_on) AS rest
            CROSS JOIN LATERAL (SELECT n.position, n.total_delivered
                                  FROM @extschema@.outbox_batches n
                                 WHERE n.destination = h.destination AND n.shard = h.shard
                                 ORDER BY n.destination DESC, n.shard DESC, n.seq DESC LIMIT 1) AS b
            WHERE h.destination = d.destination) AS s
   CROSS JOIN LATERAL (
           SELECT pg_catalog.count(*) AS events, pg_catalog.count(*) FILTER (WHERE p.state = 'retry') AS retry, pg_catalog.min(greatest(p.deliver_after, p.created_at)) AS oldest
             FROM @extschema@.outbox_parked p
            WHERE p.destination = d.destination AND p.state IN ('retry', 'blocked')) AS waiting
   CROSS JOIN LATERAL (
           SELECT pg_catalog.count(*) AS events FROM @extschema@.outbox_parked p
            WHERE p.destination = d.destination AND p.state = 'dead') AS dead
    -- Once, not for each destination: the planner would think the view dear, and compile it for seconds.
    LEFT JOIN (SELECT holder, pg_catalog.sum(r.bytes)::bigint AS bytes
                 FROM @extschema@.ring_status r, pg_catalog.unnest(r.held_by) AS holder
                GROUP BY holder) AS held ON held.holder = 'destination ' || d.name;
COMMENT ON VIEW @extschema@.outbox_status
IS 'one row for each destination: what it does, how far it is behind, what failed';
COMMENT ON COLUMN @extschema@.outbox_status.holds_back_bytes
IS 'size of the pieces of the log that take no more events and cannot be emptied because of this destination';
COMMENT ON COLUMN @extschema@.outbox_status.backlog
IS 'upper bound of the events that are not recorded yet: positions behind, whether or not the destination wants them';

CREATE VIEW @extschema@.outbox_kind_options AS
  SELECT k.kind, k.library, o.*
    FROM (SELECT b.kind, b.library FROM @extschema@.outbox_built_in_kinds() AS b
          UNION ALL
          SELECT r.kind, r.library FROM @extschema@.outbox_kinds r) AS k (kind, library)
    LEFT JOIN LATERAL @extschema@.outbox_options_of_kind(k.kind) AS o ON true;
COMMENT ON VIEW @extschema@.outbox_kind_options
IS 'the kinds of destinations and the options that each takes; defaults of durations are in milliseconds';
-- The processes.

CREATE FUNCTION @extschema@.outbox_run_worker()
RETURNS integer LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_outbox_run_worker';
COMMENT ON FUNCTION @extschema@.outbox_run_worker()
IS 'starts one worker for this database by hand and returns its process id; for servers without a launcher';

CREATE FUNCTION @extschema@.outbox_list_workers()
RETURNS TABLE (process text, pid integer, database name, state text, since timestamptz, shards integer,
               last_error text, error_at timestamptz)
LANGUAGE c VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'retrysafe_outbox_list_workers';
COMMENT ON FUNCTION @extschema@.outbox_list_workers() IS 'the launcher and the workers of the whole server';

CREATE VIEW @extschema@.outbox_workers AS SELECT * FROM @extschema@.outbox_list_workers();
COMMENT ON VIEW @extschema@.outbox_workers
IS 'the launcher and the workers of the whole server; empty where retrysafe is not in shared_preload_libraries';
-- Nothing of retrysafe is executable or readable by PUBLIC; retrysafe_grant hands out what a role needs.

-- The functions and views that belong to an access. Functions that a view calls run with the rights of who reads
-- the view, so reading it includes them.
CREATE FUNCTION @extschema@.retrysafe_objects_of(access text)
RETURNS TABLE (kind text, object oid, identity text)
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
  WITH members AS (
    SELECT d.classid, d.objid
      FROM pg_depend d
      JOIN pg_extension e ON e.oid = d.refobjid
     WHERE e.extname = 'retrysafe' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  ), functions AS (
    SELECT p.oid, p.proname::text AS name, p.oid::regprocedure::text AS identity
      FROM members m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
  ), views AS (
    SELECT c.oid, c.oid::regclass::text AS identity
      FROM members m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid AND c.relkind = 'v'
  ), called_by_views AS (
    SELECT d.refobjid AS oid
      FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                                        AND d.refclassid = 'pg_proc'::regclass
     WHERE r.ev_class IN (SELECT oid FROM views)
  )
  SELECT 'ROUTINE', f.oid, f.identity
    FROM functions f
   WHERE CASE
         WHEN access = 'write'
         THEN f.name IN ('idem_begin', 'idem_try_begin', 'idem_complete', 'idem_run', 'idem_hash', 'idem_peek', 'outbox_emit',
                         'outbox_cancel', 'outbox_event_id', 'inbox_accept')
         WHEN access IN ('consume', 'relay')
         THEN f.name IN ('outbox_fetch', 'outbox_ack', 'outbox_nack', 'outbox_renew', 'outbox_release', 'outbox_record',
                         'outbox_wait', 'outbox_relay_destination', 'outbox_options_of_kind')
              OR (access = 'relay' AND f.name = 'outbox_relay_options')
         WHEN access = 'monitor' THEN f.oid IN (SELECT oid FROM called_by_views)
         -- Not what tells secrets, nor what only the owner and triggers call.
         WHEN access = 'admin'
         THEN f.name NOT IN ('outbox_relay_options', 'retrysafe_apply_grant', 'retrysafe_apply_revoke',
                             'outbox_only_the_owner_writes')
         END
  UNION ALL
  SELECT 'TABLE', v.oid, v.identity FROM views v WHERE access IN ('monitor', 'admin')
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_objects_of(text)
IS 'the functions and views that an access of retrysafe_grant consists of';

-- Run as the owner of the extension: the holder of admin access hands access on without owning it.
CREATE FUNCTION @extschema@.retrysafe_grant(role regrole, access text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_grant';
COMMENT ON FUNCTION @extschema@.retrysafe_grant(regrole, text)
IS 'gives a role the access write, consume, relay, monitor or admin';

CREATE FUNCTION @extschema@.retrysafe_revoke(role regrole, access text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'retrysafe_revoke';
COMMENT ON FUNCTION @extschema@.retrysafe_revoke(regrole, text)
IS 'takes an access from a role; what its other accesses include stays';

CREATE FUNCTION @extschema@.retrysafe_apply_grant(role regrole, access text)
RETURNS void LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'retrysafe');  -- it may be renamed
  o record;
BEGIN
  EXECUTE pg_catalog.format('SELECT %s.retrysafe_check_access($1, $2)', schema) USING role, access;
  EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
  FOR o IN EXECUTE pg_catalog.format('SELECT * FROM %s.retrysafe_objects_of($1)', schema) USING access LOOP
    EXECUTE pg_catalog.format('GRANT %s ON %s %s TO %s', CASE o.kind WHEN 'TABLE' THEN 'SELECT' ELSE 'EXECUTE' END, o.kind,
                   o.identity, role);
  END LOOP;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_apply_grant(regrole, text)
IS 'what retrysafe_grant does, with the rights of who calls it';

CREATE FUNCTION @extschema@.retrysafe_apply_revoke(role regrole, access text)
RETURNS void LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'retrysafe');
  o record;
  kept text[];
BEGIN
  EXECUTE pg_catalog.format('SELECT %s.retrysafe_check_access($1, $2)', schema) USING role, access;
  IF role = (SELECT extowner FROM pg_extension WHERE extname = 'retrysafe') THEN
    RAISE EXCEPTION 'no access is taken from the owner of the extension'
      USING ERRCODE = 'RS214', HINT = 'All calls run with the rights of the owner. REASSIGN OWNED makes another role the owner.';
  END IF;
  -- Some functions belong to two accesses: what another access that the role holds includes stays. Revoking admin takes
  -- everything.
  EXECUTE pg_catalog.format(
    $q$SELECT pg_catalog.array_agg(other)
         FROM pg_catalog.unnest(ARRAY['write', 'consume', 'relay', 'monitor', 'admin']) AS other
        WHERE $2 <> 'admin' AND other <> $2 AND %s.retrysafe_holds($1, other)$q$, schema)
    INTO kept USING role, access;
  FOR o IN EXECUTE pg_catalog.format(
    $q$SELECT DISTINCT mine.kind, mine.identity
         FROM pg_catalog.unnest(CASE $1 WHEN 'admin' THEN ARRAY['admin', 'relay'] ELSE ARRAY[$1] END) AS taken,
              %1$s.retrysafe_objects_of(taken) AS mine
        WHERE NOT EXISTS (SELECT FROM pg_catalog.unnest($2) AS other, %1$s.retrysafe_objects_of(other) AS theirs
                           WHERE theirs.kind = mine.kind AND theirs.object = mine.object)$q$, schema)
    USING access, kept
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON %s %s FROM %s', o.kind, o.identity, role);
  END LOOP;
  IF kept IS NULL THEN
    EXECUTE pg_catalog.format('REVOKE USAGE ON SCHEMA %s FROM %s', schema, role);
  END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_apply_revoke(regrole, text)
IS 'what retrysafe_revoke does, with the rights of who calls it';

CREATE FUNCTION @extschema@.retrysafe_check_access(role regrole, access text)
RETURNS void LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF access IS NULL OR access NOT IN ('write', 'consume', 'relay', 'monitor', 'admin') THEN
    RAISE EXCEPTION 'unknown access %', coalesce('"' || access || '"', 'NULL')
      USING ERRCODE = 'RS214', HINT = 'It must be write, consume, relay, monitor or admin.';
  END IF;
  IF role IS NULL OR role = 0 THEN
    RAISE EXCEPTION 'access is given to a role, not to everybody'
      USING ERRCODE = 'RS214', HINT = 'Name the role that the service connects as.';
  END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.retrysafe_check_access(regrole, text) IS 'raises unless role and access exist';

-- Given to the role itself, not through a membership.
CREATE FUNCTION @extschema@.retrysafe_holds(role regrole, access text)
RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
  SELECT coalesce(pg_catalog.bool_and(EXISTS (
           SELECT FROM pg_catalog.aclexplode(CASE o.kind
                                               WHEN 'TABLE' THEN (SELECT relacl FROM pg_class WHERE oid = o.object)
                                               ELSE (SELECT proacl FROM pg_proc WHERE oid = o.object)
                                             END) AS item
            WHERE item.grantee = role)), false)
    FROM @extschema@.retrysafe_objects_of(access) AS o;
END;
COMMENT ON FUNCTION @extschema@.retrysafe_holds(regrole, text) IS 'whether a role was given all of an access';

-- Nor by roles that default privileges of the installing role name: they were not meant for saved answers and secrets.
DO $$
DECLARE
  given record;
BEGIN
  FOR given IN
    WITH objects AS (
      SELECT 'ROUTINE' AS kind, 'pg_proc'::regclass AS catalog, oid, oid::regprocedure::text AS identity,
             coalesce(proacl, pg_catalog.acldefault('f', proowner)) AS acl, proowner AS owner
        FROM pg_proc
      UNION ALL
      SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, 'pg_class'::regclass, oid, oid::regclass::text,
             relacl, relowner
        FROM pg_class WHERE relkind IN ('r', 'v', 'S')
    )
    SELECT DISTINCT o.kind, o.identity, CASE item.grantee WHEN 0 THEN 'PUBLIC' ELSE item.grantee::regrole::text END AS role
      FROM objects o
      JOIN pg_depend d ON d.classid = o.catalog AND d.objid = o.oid AND d.deptype = 'e'
      JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid AND e.extname = 'retrysafe',
           pg_catalog.aclexplode(o.acl) AS item
     WHERE item.grantee <> o.owner
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON %s %s FROM %s', given.kind, given.identity, given.role);
  END LOOP;
END
$$;
