/* The mailbox protocol of the fused tail (docs/protocol.md), for exhaustive checking with spin.
 *
 * Every rank runs CALLS calls, as LAYERS layers a step. A rank is two blocks of one grid: Front
 * publishes and polls, Rear re-arms, and they meet only at the header (arrivals) and at the end of
 * the grid. A store to a peer travels through Wire, which delivers it at any later time. The
 * schedule (tokens of each call, constant or changing; with -DTWO_SHOT, which calls go in two
 * shots) is chosen at the start, alike on all ranks. -DSCATTERED leaves the output where it is,
 * and with -DONE_FAR only stores from and to rank 0 take their time.
 *
 * Checked by assertion: a word is stored only into an armed word (nothing lost), a word read is of
 * this call (nothing stale), every block of a call reads the same epoch. Checked by spin itself:
 * nobody waits for ever (invalid end states).
 *
 * -DMORTAL lets one rank stop anywhere in the first run: the others run out of their poll budget
 * (`timeout`: nothing else can move) and freeze. Then every rank recovers, in two steps with a wait
 * after each, and a second run must be clean.
 *
 * Deliberately broken, each must be caught: -DSLOTS=2, -DNO_REARM, -DREARM_CURRENT (clears as many
 * rows as this call has, not as the previous one had), -DSLOT_BY_LAYER (slot from the layer's
 * number instead of the epoch: wrong when LAYERS % 3 == 1), -DNO_FREEZE (calls after a failure go
 * on publishing), -DNO_FIRST_WAIT and -DNO_SECOND_WAIT (of the recovery).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef LAYERS
#define LAYERS 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef TOKENS
#define TOKENS 2
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
#define CALLS (LAYERS * STEPS)
#define ARMED 0

#define LATENT 0 /* partial of row t from one rank, for whoever sums row t */
#define NORMED 1 /* finished row t from its owner; two shots only */
#define OUTPUT 2 /* one rank's columns of row t, for everybody */
#define WORD(kind, rank, slot, from, t) \
  (((((kind) * RANKS + (rank)) * SLOTS + (slot)) * RANKS + (from)) * TOKENS + (t))

byte word[3 * RANKS * SLOTS * RANKS * TOKENS];
chan wire[RANKS * RANKS] = [3 * TOKENS] of { byte, byte, byte, byte }; /* kind, slot, t, value */

byte tokens[CALLS];   /* the schedule, the same on all ranks */
bit two_shot[CALLS];

byte epoch[RANKS];    /* the header */
byte arrivals[RANKS];
byte previous[RANKS]; /* tokens of the call before */
bool failed[RANKS];

byte front_done[RANKS]; /* calls that a block has finished in this run */
byte rear_done[RANKS];
bit second_run[RANKS];
byte ended[RANKS];    /* blocks of the run that have ended */
bool dead[RANKS];

#ifdef MORTAL
bool mortal = true;
#define MAY_DIE \
  if \
  :: mortal && !second_run[me] -> mortal = false; goto died \
  :: true \
  fi
#define GIVE_UP :: timeout -> failed[me] = true
#else
#define MAY_DIE skip
#define GIVE_UP
#endif

#ifdef NO_FREEZE
#define FROZEN false
#else
#define FROZEN failed[me]
#endif

/* Values differ between runs, so that a word left over from a failed run is seen as stale. */
#define VALUE(call) (second_run[me] * CALLS + (call) + 1)

#ifdef SLOT_BY_LAYER
#define SLOT(call) (((call) % LAYERS) % SLOTS)
#define SLOT_BEFORE(call) ((((call) + LAYERS - 1) % LAYERS) % SLOTS)
#else
#define SLOT(call) ((call) % SLOTS)
#define SLOT_BEFORE(call) (((call) + SLOTS - 1) % SLOTS)
#endif

/* The last block to read the header moves it on for the next call. */
#define READ_HEADER \
  atomic { \
    e = epoch[me]; \
    n = tokens[e]; \
    two = two_shot[e]; \
    before = previous[me]; \
    arrivals[me]++; \
    if \
    :: arrivals[me] == 2 -> arrivals[me] = 0; previous[me] = n; epoch[me] = e + 1 \
    :: else \
    fi \
  }

#ifdef ONE_FAR
#define DIRECT(from, to) ((from) == (to) || ((from) != 0 && (to) != 0))
#else
#define DIRECT(from, to) ((from) == (to))
#endif

#define STORE(kind, rank, slot, from, t, value) \
  assert(word[WORD(kind, rank, slot, from, t)] == ARMED); \
  word[WORD(kind, rank, slot, from, t)] = value

/* A row goes to all its readers in one step: the wires deliver each copy at a time of its own. */
#define SEND_ROW(kind, reader) \
  atomic { \
    for (p : 0 .. RANKS - 1) { \
      if \
      :: reader && DIRECT(me, p) -> STORE(kind, p, SLOT(e), me, t, VALUE(e)) \
      :: reader && !DIRECT(me, p) -> wire[me * RANKS + p]!kind, SLOT(e), t, VALUE(e) \
      :: else \
      fi \
    } \
  }

/* Waits for one word of a row, from the rank in p, and looks at it. */
#define AWAIT(kind) \
  if \
  :: atomic { \
       word[WORD(kind, me, SLOT(e), p, t)] != ARMED -> \
       assert(word[WORD(kind, me, SLOT(e), p, t)] == VALUE(e)) \
     } \
  :: failed[me] \
  GIVE_UP \
  fi

#define OWNS (t % RANKS == me)

inline publish() {
  for (t : 0 .. n - 1) {
    SEND_ROW(LATENT, (!two || t % RANKS == p));
    MAY_DIE
  }
}

inline reduce() {
  for (t : 0 .. n - 1) {
    if
    :: !two || OWNS ->
       for (p : 0 .. RANKS - 1) { AWAIT(LATENT) }
       if
       :: two -> SEND_ROW(NORMED, true); MAY_DIE
       :: else
       fi
    :: else
    fi
  }
}

inline project() {
  for (t : 0 .. n - 1) {
    if
    :: two -> p = t % RANKS; AWAIT(NORMED)
    :: else
    fi;
#ifndef SCATTERED
    SEND_ROW(OUTPUT, true);
#endif
    MAY_DIE
  }
}

inline gather() {
#ifndef SCATTERED
  for (t : 0 .. n - 1) {
    for (p : 0 .. RANKS - 1) { AWAIT(OUTPUT) }
  }
#endif
  skip
}

#ifdef MORTAL
byte out;   /* ranks that have left the first run behind */
byte ready; /* ranks whose words are armed again */

/* A rank's kernels have ended, which means that its stores have arrived. */
#define IS_OUT (ended[me] == 2 && empty(wire[me * RANKS]) && empty(wire[me * RANKS + RANKS - 1]))

inline recover() {
  e = 0; n = 0; before = 0; p = 0; t = 0; two = 0;
  atomic { IS_OUT -> out++ }
#ifndef NO_FIRST_WAIT
  out == RANKS;
#endif
  d_step {
    for (t : 0 .. 3 * RANKS * SLOTS * RANKS * TOKENS - 1) {
      if
      :: (t / (SLOTS * RANKS * TOKENS)) % RANKS == me -> word[t] = ARMED
      :: else
      fi
    }
    t = 0;
    epoch[me] = 0; arrivals[me] = 0; previous[me] = 0;
    failed[me] = false; dead[me] = false; front_done[me] = 0; rear_done[me] = 0;
    ended[me] = 0; second_run[me] = 1; ready++
  }
}

#ifdef NO_SECOND_WAIT
#define MAY_BEGIN second_run[me]
#else
#define MAY_BEGIN ready == RANKS
#endif
#endif

proctype Front(byte me) {
  byte e, n, before, p, t;
  bit two;
begin:
  do
  :: front_done[me] < CALLS && rear_done[me] >= front_done[me] ->
     READ_HEADER;
     assert(e == front_done[me]);
     if
     :: FROZEN
     :: else -> publish(); reduce(); project(); gather()
     fi;
     front_done[me]++
  :: front_done[me] == CALLS -> goto finish
  od;
died:
  dead[me] = true;
finish:
  ended[me]++;
#ifdef MORTAL
  if
  :: !second_run[me] -> recover(); MAY_BEGIN; goto begin
  :: else
  fi
#endif
}

proctype Rear(byte me) {
  byte e, n, before, p, t;
  bit two;
begin:
  do
  :: rear_done[me] < CALLS && front_done[me] >= rear_done[me] && !dead[me] ->
     READ_HEADER;
     assert(e == rear_done[me]);
     if
     :: FROZEN -> before = 0
     :: else
     fi;
#ifdef REARM_CURRENT
     before = n;
#endif
#ifndef NO_REARM
     for (t : 0 .. before - 1) {
       d_step {
         for (p : 0 .. RANKS - 1) {
           word[WORD(LATENT, me, SLOT_BEFORE(e), p, t)] = ARMED;
           word[WORD(NORMED, me, SLOT_BEFORE(e), p, t)] = ARMED;
           word[WORD(OUTPUT, me, SLOT_BEFORE(e), p, t)] = ARMED
         }
         p = 0
       }
     }
#endif
     rear_done[me]++
  :: rear_done[me] == CALLS || dead[me] -> break
  od;
#ifdef MORTAL
  if
  :: !second_run[me] ->
     e = 0; n = 0; before = 0; p = 0; t = 0; two = 0;
     ended[me]++;
     second_run[me] && MAY_BEGIN;
     goto begin
  :: else -> ended[me]++
  fi
#else
  ended[me]++
#endif
}

proctype Wire(byte from; byte to) {
  byte kind, slot, t, value;
end:
  do
  :: atomic {
       wire[from * RANKS + to]?kind, slot, t, value ->
       STORE(kind, to, slot, from, t, value)
     }
  od
}

init {
  byte i, j;
  select(j : 0 .. 2);
  for (i : 0 .. CALLS - 1) { tokens[i] = (j == 2 -> TOKENS : 1 + (i / 2 + j) % TOKENS) }
  j = 0;
#ifdef TWO_SHOT
  select(j : 0 .. 2);
  for (i : 0 .. CALLS - 1) { two_shot[i] = (j == 2 -> 1 : (i / 2 + j) % 2) }
  j = 0;
#endif
  atomic {
    for (i : 0 .. RANKS * RANKS - 1) {
      if
      :: !DIRECT(i / RANKS, i % RANKS) -> run Wire(i / RANKS, i % RANKS)
      :: else
      fi
    }
    for (i : 0 .. RANKS - 1) {
      run Front(i);
      run Rear(i)
    }
  }
#ifdef MORTAL
  ready == RANKS;
  for (i : 0 .. RANKS - 1) { ended[i] == 2; assert(!failed[i]) }
#else
  for (i : 0 .. RANKS - 1) { ended[i] == 2 }
#endif
}
