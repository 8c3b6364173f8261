#include "idempotency/claims.hpp"

#include <algorithm>

#include "pg/error.hpp"
#include "pg/xact_events.hpp"
#include "settings.hpp"

namespace retrysafe::idempotency {

namespace {

struct Bucket {
  uint64 hash;  // the key of the hash table, so it comes first
  Claim *first;
};

// One change of one claim, to be taken back when `subtransaction` is rolled back.
struct Change {
  Claim *claim;
  ClaimState undone;   // the state to return to
  const Terms *terms;  // likewise
  int32 events;        // likewise
  SubTransactionId subtransaction;
};

// Lives in TopTransactionContext and goes with it. `changes` is ordered by time, so those of the
// subtransaction that ends are always its tail. What the top level did is not kept there: only the whole
// transaction can undo it.
struct Registry {
  MemoryContext memory;
  HTAB *buckets;
  Claim *last;
  Change *changes;
  int change_count;
  int change_capacity;
};

constinit Registry *registry = nullptr;

Registry &open_registry() {
  if (registry) return *registry;
  pg::ask_before_others();
  MemoryContext memory =
      AllocSetContextCreate(TopTransactionContext, "retrysafe claims", ALLOCSET_SMALL_SIZES);
  auto *fresh = static_cast<Registry *>(MemoryContextAllocZero(memory, sizeof(Registry)));
  fresh->memory = memory;
  HASHCTL control{};
  control.keysize = sizeof(uint64);
  control.entrysize = sizeof(Bucket);
  control.hcxt = memory;
  fresh->buckets = hash_create("retrysafe claims", 16, &control, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
  registry = fresh;
  return *registry;
}

Claim *find(const Key &key, uint64 hash) {
  if (!registry) return nullptr;
  auto *bucket = static_cast<Bucket *>(hash_search(registry->buckets, &hash, HASH_FIND, nullptr));
  Claim *claim = bucket ? bucket->first : nullptr;
  while (claim &&
         (claim->key.key_bytes() != key.key_bytes() || claim->key.scope_bytes() != key.scope_bytes()))
    claim = claim->same_hash;
  return claim;
}

template <class Varlena>
Varlena *copy(const Varlena *value) {
  const Size size = VARSIZE_ANY(value);
  return static_cast<Varlena *>(memcpy(palloc(size), value, size));
}

Claim *find_or_add(const Key &key) {
  const uint64 hash = hash_of(key);
  if (Claim *claim = find(key, hash)) return claim;
  Registry &r = open_registry();
  MemoryContext caller = MemoryContextSwitchTo(r.memory);
  auto *claim = static_cast<Claim *>(palloc0(sizeof(Claim)));
  claim->key = Key{copy(key.key), copy(key.scope)};
  claim->hash = hash;
  bool found;
  auto *bucket = static_cast<Bucket *>(hash_search(r.buckets, &hash, HASH_ENTER, &found));
  claim->same_hash = found ? bucket->first : nullptr;
  bucket->first = claim;
  claim->previous = r.last;
  r.last = claim;
  MemoryContextSwitchTo(caller);
  return claim;
}

// To be called before the change.
void note_change(Claim *claim, ClaimState undone) {
  Registry &r = open_registry();
  const SubTransactionId subtransaction = GetCurrentSubTransactionId();
  if (subtransaction == TopSubTransactionId) return;
  if (r.change_count == r.change_capacity) {
    const int capacity = std::max(16, r.change_capacity * 2);
    const Size size = sizeof(Change) * static_cast<Size>(capacity);
    r.changes = static_cast<Change *>(r.changes ? repalloc_huge(r.changes, size)
                                                : MemoryContextAllocHuge(r.memory, size));
    r.change_capacity = capacity;
  }
  r.changes[r.change_count++] = {claim, undone, claim->terms, claim->events, subtransaction};
}

// Numbering changes nothing but the number, which an earlier change of this subtransaction takes back as
// well.
bool is_last_change(const Claim *claim) {
  const Registry &r = *registry;
  if (r.change_count == 0) return false;
  const Change &last = r.changes[r.change_count - 1];
  return last.claim == claim && last.subtransaction == GetCurrentSubTransactionId();
}

void change(Claim *claim, ClaimState state, const Terms *terms, ClaimState undone) {
  note_change(claim, undone);
  claim->state = state;
  claim->terms = terms;
}

// --- the end of transactions -------------------------------------------------------------------------------

void forget_all() noexcept {
  registry = nullptr;  // the memory goes with TopTransactionContext
}

void subtransaction_committed(SubTransactionId sub, SubTransactionId parent) noexcept {
  if (!registry) return;
  Registry &r = *registry;
  for (int i = r.change_count; i > 0 && r.changes[i - 1].subtransaction == sub; --i) {
    if (parent == TopSubTransactionId)
      r.change_count = i - 1;
    else
      r.changes[i - 1].subtransaction = parent;
  }
}

void subtransaction_aborted(SubTransactionId sub, SubTransactionId) noexcept {
  if (!registry) return;
  Registry &r = *registry;
  for (; r.change_count > 0 && r.changes[r.change_count - 1].subtransaction == sub; --r.change_count) {
    const Change &last = r.changes[r.change_count - 1];
    last.claim->state = last.undone;
    last.claim->terms = last.terms;
    last.claim->events = last.events;
  }
}

// Deferred triggers have run: whatever is not completed now never will be.
void check_claims() {
  if (!registry) return;
  const Claim *lost = nullptr;
  int lost_count = 0;
  for (const Claim *claim = registry->last; claim; claim = claim->previous) {
    if (claim->state == ClaimState::kOwned)
      pg::raise(kKeyNotCompleted,
                "Call idem_complete before the transaction ends, or roll it back to give the key up. With "
                "autocommit each statement is a transaction of its own: use BEGIN.",
                "idempotency key \"%s\" was begun and not completed", text_to_cstring(claim->key.key));
    if (claim->state == ClaimState::kLost) {
      lost = claim;
      ++lost_count;
    }
  }
  if (!lost) return;
  const char *const hint =
      "What the transaction wrote is not protected by the key. Call idem_begin outside of savepoints "
      "and exception blocks that may be rolled back, or begin the key again.";
  char *text = psprintf("the claim on idempotency key \"%s\" was rolled back and the key was not begun again",
                        text_to_cstring(lost->key.key));
  if (lost_count > 1) text = psprintf("%s (and %d more keys)", text, lost_count - 1);
  if (settings::on_lost_claim == static_cast<int>(settings::OnLostClaim::kError))
    pg::raise(kLostClaimAtCommit, hint, "%s", text);
  pg::warn(kLostClaimAtCommit, hint, "%s", text);
}

constexpr pg::XactSubscriber subscriber{
    .before_commit = check_claims,
    .before_prepare = check_claims,
    .after_commit = forget_all,
    .after_prepare = forget_all,
    .after_abort = forget_all,
    .sub_commit = subtransaction_committed,
    .sub_abort = subtransaction_aborted,
};

}  // namespace

const Claim *find_claim(const Key &key) {
  return registry ? find(key, hash_of(key)) : nullptr;
}

namespace {

Claim *require(const Key &key) {
  Claim *claim = registry ? find(key, hash_of(key)) : nullptr;
  switch (claim ? claim->state : ClaimState::kNone) {
    case ClaimState::kOwned:
    case ClaimState::kCompleted:
      return claim;
    case ClaimState::kLost:
      pg::raise(kClaimLost,
                "The savepoint or exception block in which the key was begun was rolled back. Begin the key "
                "again and look at the outcome, or roll the transaction back.",
                "the claim on idempotency key \"%s\" was rolled back", text_to_cstring(key.key));
    case ClaimState::kNone:
      pg::raise(kKeyNotOwned,
                "Call idem_begin with this key and scope in this transaction first, and go on only when the "
                "outcome is \"new\". With autocommit each statement is a transaction of its own: use BEGIN.",
                "this transaction does not own idempotency key \"%s\"", text_to_cstring(key.key));
  }
  pg_unreachable();
}

}  // namespace

void require_claim(const Key &key) {
  (void)require(key);
}

int32 number_event(const Key &key) {
  Claim *claim = require(key);
  if (claim->events == PG_INT32_MAX) elog(ERROR, "retrysafe: too many events for one idempotency key");
  if (!is_last_change(claim)) note_change(claim, claim->state);
  return ++claim->events;
}

void claim_begun(const Key &key, const Terms &terms) {
  Claim *claim = find_or_add(key);
  MemoryContext caller = MemoryContextSwitchTo(registry->memory);
  auto *kept = static_cast<Terms *>(palloc(sizeof(Terms)));
  kept->begun_at = terms.begun_at;
  kept->ttl = terms.ttl
                  ? static_cast<Interval *>(memcpy(palloc(sizeof(Interval)), terms.ttl, sizeof(Interval)))
                  : nullptr;
  kept->request_hash = copy(terms.request_hash);
  MemoryContextSwitchTo(caller);
  if (claim->state != ClaimState::kLost) claim->begun_in = GetCurrentSubTransactionId();
  change(claim, ClaimState::kOwned, kept, ClaimState::kLost);
}

void claim_completed(const Key &key) {
  Claim *claim = find_or_add(key);
  change(claim, ClaimState::kCompleted, claim->terms, ClaimState::kOwned);
}

void claim_dropped(const Key &key) {
  Claim *claim = registry ? find(key, hash_of(key)) : nullptr;
  if (claim && claim->state != ClaimState::kNone)
    change(claim, ClaimState::kNone, claim->terms, claim->state);
}

void forget_claims_lost_in(SubTransactionId sub) {
  if (!registry) return;
  // Subtransactions are numbered as they begin: `sub`, and then those within it.
  for (Claim *claim = registry->last; claim; claim = claim->previous)
    if (claim->state == ClaimState::kLost && claim->begun_in >= sub) claim->state = ClaimState::kNone;
}

void watch_claims() {
  pg::subscribe_to_transactions(&subscriber);
}

}  // namespace retrysafe::idempotency
