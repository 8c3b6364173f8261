/*
 * The window reader, and claim, publish, record and take-over, small enough to be checked exhaustively.
 *
 * The model is of src/outbox: emit (append.cpp), snapshot.cpp, window.cpp, claim.cpp, record.cpp, and of the order of
 * steps in src/storage by which a piece of the log is emptied. All events have one ordering key and belong to one shard:
 * that is the hardest case. test/model/README.md tells what is left out, and test/model/run checks it: as it stands in
 * several sizes, and with each of the mistakes below (`#ifdef` in capitals) that the checker has to find.
 *
 * Sets of transactions and of positions are bit masks; a statement is one step, and d_step makes several of them one.
 */

#ifndef WRITERS
#define WRITERS 2           /* transactions beside the one that creates the destination */
#endif
#ifndef EVENTS
#define EVENTS 1            /* of each of them */
#endif
#ifndef WORKERS
#define WORKERS 1
#endif
#ifndef CRASHES
#define CRASHES 1           /* of workers */
#endif
#ifndef BATCH
#define BATCH 1             /* events */
#endif

#define POSITIONS (3 + WRITERS * EVENTS)    /* one more than are drawn: the creator's event, and one by sealing */
#define NOBODY 255

#define member(set, n) (((set) >> (n)) & 1)
#define only(n) (1 << (n))
#define below(n) ((1 << (n)) - 1)

/* --- the server ------------------------------------------------------------------------------------------- */

byte next_tx = 1;           /* the next transaction number */
byte latest_completed = 0;
byte running = 0, committed = 0;    /* sets of transactions */
byte position = 0;          /* the sequence: last position drawn */

/* --- the log ---------------------------------------------------------------------------------------------- */

byte writer[POSITIONS];     /* 0: no row (yet) */
byte writing = 0;           /* who holds the ring lock, shared */
bool rotated = false;       /* rows go into the second piece */
byte first_piece = 0;       /* transactions that wrote into the first one */
byte emptied = 0;           /* positions whose piece was emptied */
byte writers_left = WRITERS + 1;

/* --- the destination: what is stored, and so survives a crash ---------------------------------------------- */

typedef Snapshot { byte floor, xmax, xip, next, ceiling }

bool created = false;
Snapshot done;              /* all that it sees is done */
Snapshot window;            /* the one that is being read, if it is stored */
bool window_stored = false;
byte cursor = 0;            /* of that window: all up to here is done */
byte token = 0;             /* fencing token */
byte holder = NOBODY;
bool passed_over[WORKERS];  /* a worker's memory of windows without events is good until somebody records */

/* --- what is promised ------------------------------------------------------------------------------------- */

byte visible = 0;           /* positions of committed events */
byte before_start = 0;      /* those that were committed when the destination was created: not for it */
byte earlier[POSITIONS];    /* positions that were committed when this one was drawn */
byte published = 0;         /* a receiver has them */
byte recorded = 0;          /* in a batch that somebody recorded after it was published */
bool over = false;          /* a worker has found that nothing more can come */

#define wanted (visible & ~before_start)

/* --- snapshots: src/core/snapshot.hpp ----------------------------------------------------------------------- */

#define ended(s, tx) ((tx) < s.xmax && !member(s.xip, tx))
#ifdef NO_LATE_RANGE
#define may_be_late(s, tx) (member(s.xip, tx))
#else
#define may_be_late(s, tx) ((tx) < s.next && !ended(s, tx))
#endif

/* What the server calls a snapshot: xmax is one above the newest transaction that has ended, and its list leaves out the
 * running ones from there on, and the taker itself. `then` is for the promises: what was committed at that instant. */
inline take_snapshot(s, taker, then) {
#ifdef CEILING_BEFORE_SNAPSHOT
  s.ceiling = position;
#endif
#ifndef FLOOR_AFTER_NEXT
  s.floor = position;
#endif
  d_step { s.xmax = latest_completed + 1; s.xip = running & below(s.xmax) & ~only(taker); then = visible }
  s.next = next_tx;
#ifdef FLOOR_AFTER_NEXT
  s.floor = position;
#endif
#ifndef CEILING_BEFORE_SNAPSHOT
  s.ceiling = position;
#endif
  printf("snapshot: floor %d, xmax %d, xip %x, next %d, ceiling %d\n", s.floor, s.xmax, s.xip, s.next, s.ceiling)
}

inline copy(to, from) {
  to.floor = from.floor; to.xmax = from.xmax; to.xip = from.xip; to.next = from.next; to.ceiling = from.ceiling
}

/* --- emit -------------------------------------------------------------------------------------------------- */

inline get_number() {
  d_step { tx = next_tx; next_tx++; running = running | only(tx) }
}

inline draw() {
  d_step { position++; id = position; earlier[id] = visible }
}

/* The position is drawn and the row is put into the active piece under the ring lock; the transaction goes on. */
inline emit() {
  writing++;
#ifdef POSITION_BEFORE_NUMBER
  draw();
  if
  :: tx == 0 -> get_number()
  :: else
  fi;
#else
  if
  :: tx == 0 -> get_number()
  :: else
  fi;
  draw();
#endif
  d_step {
    writer[id] = tx; mine = mine | only(id);
    printf("transaction %d writes position %d\n", tx, id);
    if
    :: !rotated -> first_piece = first_piece | only(tx)
    :: else
    fi;
    writing--
  }
}

/* A commit is visible to others at the instant at which the number leaves the list of running ones. */
inline end_transaction(commits) {
  d_step {
    running = running & ~only(tx);
    if
    :: commits -> printf("transaction %d commits\n", tx); committed = committed | only(tx); visible = visible | mine
    :: else -> printf("transaction %d rolls back\n", tx)
    fi;
    if
    :: latest_completed < tx -> latest_completed = tx
    :: else
    fi;
    writers_left--
  }
}

proctype Writer() {
  byte tx = 0, id, mine = 0, left = EVENTS;
  do
  :: left > 0 -> emit(); left--
  :: else -> break
  od;
  if
  :: end_transaction(true)
  :: end_transaction(false)
  fi
}

/* Creates the destination and emits in one transaction: its own event is not done. */
proctype Creator() {
  byte tx = 0, id, mine = 0;
  emit();
  take_snapshot(done, tx, before_start);
#ifndef OWN_TRANSACTION_MISSING
  d_step {
    if
    :: tx < done.xmax -> done.xip = done.xip | only(tx)
    :: else             /* among those from xmax on, which count as running */
    fi
  }
#endif
  atomic { end_transaction(true); created = true }
}

/* --- a worker ---------------------------------------------------------------------------------------------- */

/* Is the row of this position in the window between `d` and `w`? Only committed rows are seen at all: the server tells. */
#ifdef ENDED_IS_COMMITTED
#define row_seen(i) (writer[i] != 0 && !member(emptied, i))
#else
#define row_seen(i) (writer[i] != 0 && !member(emptied, i) && member(committed, writer[i]))
#endif
#define sees(s, i) ((i) <= s.ceiling && ended(s, writer[i]))
#define in_window(d, w, i)                                                                        \
  (row_seen(i) && ended(w, writer[i]) &&                                                          \
   (((i) <= d.floor && may_be_late(d, writer[i])) || ((i) > d.floor && (i) <= w.ceiling && !sees(d, i))))

byte crashes_left = CRASHES;
byte takeovers_left = WORKERS - 1;  /* leases that end while their holder lives */

#ifdef NO_FENCING
#define may_record true
#else
#define may_record (my_token == token)
#endif

inline record() {
  if
  :: atomic {
       may_record ->
       printf("worker %d records up to position %d, with token %d, now %d\n", me, to, my_token, token);
       assert(my_token == token);       /* a stale owner moves nothing */
       recorded = recorded | batch;
       if
#ifdef USED_UP_STAYS
       :: exhausted -> window_stored = false; cursor = 0
#else
       :: exhausted -> copy(done, w); window_stored = false; cursor = 0
#endif
       :: else -> copy(window, w); window_stored = true; cursor = to
       fi;
       i = 0;
       do
       :: i < WORKERS -> passed_over[i] = false; i++
       :: else -> break
       od;
       i = 0
     }
  :: !may_record -> goto claim          /* refused: somebody else has the shard */
  fi
}

proctype Worker(byte me) {
  Snapshot d, w;
  byte my_token, from, to, batch, count, i, unused;
  bool stored, exhausted, nothing_can_follow;

claim:
  atomic {
    created && (holder == NOBODY || (holder != me && takeovers_left > 0));
    if
    :: holder != NOBODY -> takeovers_left--
    :: else
    fi;
    token++;
    my_token = token;
    printf("worker %d claims the shard, token %d\n", me, token);
    holder = me;
    passed_over[me] = false
  }

read:
  nothing_can_follow = (writers_left == 0);
  d_step {
    if
    :: !passed_over[me] -> copy(d, done); copy(w, window); stored = window_stored; from = cursor
    :: else -> stored = false   /* and `d` is what was passed over */
    fi
  }
  if
  :: stored
  :: else -> from = 0; take_snapshot(w, 0, unused)
  fi;
  d_step {
    batch = 0; count = 0; to = from; exhausted = true; unused = 0; i = 1;
    do
    :: i < POSITIONS ->
       if
       :: i > from && in_window(d, w, i) ->
          if
          :: count < BATCH -> batch = batch | only(i); to = i; count++
          :: else -> exhausted = false
          fi
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 1
  }

  if
  :: batch == 0 && !stored && nothing_can_follow -> goto finished
  :: batch == 0 && !stored && !nothing_can_follow ->    /* A window without events is remembered, */
     if
     :: d_step { copy(d, w); passed_over[me] = true }; goto read
     :: true                        /* or stored now and then. */
     fi
  :: else
  fi;

#ifdef RECORDED_FIRST
  record();
#endif
  /* Publish. Nothing is held meanwhile. */
  do
  :: i < POSITIONS ->
     d_step {
       if
       :: member(batch, i) ->
          assert(member(committed, writer[i]));     /* nothing uncommitted, nothing rolled back */
          assert(member(published, i) || (earlier[i] & wanted & ~published) == 0);  /* the order of the key */
          published = published | only(i);
          printf("worker %d publishes position %d\n", me, i)
       :: else
       fi;
       i++
     }
  :: i == POSITIONS -> break
  :: crashes_left > 0 -> crashes_left--; printf("worker %d dies\n", me); goto crash
  od;

#ifndef RECORDED_FIRST
  record();
#endif
  goto read;

crash: /* What it knew is gone. A dead owner's lease is taken over at once. */
  atomic {
    if
    :: holder == me -> holder = NOBODY
    :: else
    fi;
    batch = 0; from = 0; to = 0; count = 0; i = 0; stored = false; exhausted = false; nothing_can_follow = false;
    my_token = 0
  }
  goto claim;

finished:
  over = true;
  printf("worker %d finds nothing more; %x wanted, %x published\n", me, wanted, published);
  assert((wanted & ~published) == 0);   /* no committed event is skipped for ever */
  assert((wanted & ~recorded) == 0);    /* who died or was late while publishing left it to others to publish again */
  if
  :: holder == me -> holder = NOBODY
  :: else
  fi
}

/* --- the ring of the log: src/storage ----------------------------------------------------------------------- */

#ifdef RING
proctype Ring() {
  byte last, sealed;
  atomic { writing == 0; last = position; rotated = true }  /* rows go into the next piece from now on */
end_no_writers_left: /* or this run ends without it */
  d_step { (first_piece & running) == 0; position++; sealed = position }    /* sealed: a position tells when */
end_done:
#ifndef RETIRED_UNCHECKED
  done.floor >= sealed;         /* all that a snapshot saw that was taken after that is done */
#endif
  emptied = below(last + 1);
  printf("the piece with the positions up to %d is emptied\n", last)
}
#endif

init {
  byte n = 0;
  atomic {
    run Creator();
    do
    :: n < WRITERS -> run Writer(); n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < WORKERS -> run Worker(n); n++
    :: else -> break
    od;
#ifdef RING
    run Ring()
#endif
  }
}

/* A worker that takes steps for ever does not go on without looking at everything: what was asserted at its end is said
 * of every run in which nobody stands still for ever. */
ltl comes_to_an_end { <> over }
