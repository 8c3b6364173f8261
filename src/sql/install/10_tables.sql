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
    FOR piece IN 1..@ring_pieces@ LOOP
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
-- row is here, that is generation 1. A generation lives in piece (generation - 1) % @ring_pieces@ + 1, and its row goes when the
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
