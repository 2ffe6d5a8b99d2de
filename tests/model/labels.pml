/* How ranks compare the labels of an NCCL process group while they train:
 * fsdp_c/_runtime/label_comparison.py and departures.py. The host of a rank issues collectives and
 * never waits. The stall monitor of the rank publishes its labels, reads those of one neighbor, and
 * reads requests. README.md lists what is modeled. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif

#include "ranks.pml"

/* Labels. NOT_ISSUED and UNKNOWN are equal to all labels. */
#define NOT_ISSUED 0
#define UNKNOWN 1
#define SAME 2
#define OTHER 3
#define IS_KNOWN(label) ((label) > UNKNOWN)
#ifdef WITHOUT_UNKNOWN_LABEL_EQUALS_ALL
#define DIFFER(a, b) ((a) != NOT_ISSUED && (b) != NOT_ISSUED && (a) != (b))
#elif defined(WITHOUT_ISSUED_LABELS_ARE_COMPARED)
#define DIFFER(a, b) ((a) != UNKNOWN && (b) != UNKNOWN && (a) != (b))
#else
#define DIFFER(a, b) (IS_KNOWN(a) && IS_KNOWN(b) && (a) != (b))
#endif

byte issued[RANKS];
byte label[RANKS * ITEMS];
bit stopped[RANKS]; /* shm_negotiation.stopped: the next collective raises */

/* The store of the process group. */
byte key[RANKS * ITEMS]; /* the labels that a rank has published */

/* The store of the job. A rank publishes at most one request. Its number is that of the rank. */
bit reserved[RANKS];  /* the counter of requests includes this one */
bit published[RANKS]; /* its key is set */
byte request_number[RANKS], request_label[RANKS];
bit difference[RANKS];
byte handled[RANKS]; /* by rank: bits of the requests whose difference the rank has read */

#ifdef WITHOUT_RING_IS_CLOSED
#define NEIGHBOR (me == 0 -> me : me - 1)
#else
#define NEIGHBOR ((me + RANKS - 1) % RANKS)
#endif

/* Whether two ranks have issued different known labels for a collective. */
#define PAIR(a, b, n)                                                                             \
    (IS_KNOWN(label[(a) * ITEMS + (n)]) && IS_KNOWN(label[(b) * ITEMS + (n)]) &&                  \
     label[(a) * ITEMS + (n)] != label[(b) * ITEMS + (n)])

proctype host(byte me) {
    do
    :: atomic { !gone[me] && !stopped[me] && issued[me] < ITEMS ->
        if
        :: label[me * ITEMS + issued[me]] = SAME
        :: faults > 0 -> faults--; label[me * ITEMS + issued[me]] = OTHER
        :: faults > 0 -> faults--; label[me * ITEMS + issued[me]] = UNKNOWN
        fi;
        issued[me]++ }
    :: atomic { faults > 0 && !gone[me] -> faults--; gone[me] = 1 }
    :: atomic { gone[me] || stopped[me] || issued[me] == ITEMS -> break }
    od
}

/* _exchange: publishes the labels if there are new ones. */
#define IS_NEW(n) (key[me * ITEMS + (n)] != label[me * ITEMS + (n)])

/* find_difference: compares with the key of the neighbor. */
#define FOUND(n) DIFFER(label[me * ITEMS + (n)], key[NEIGHBOR * ITEMS + (n)])

/* answer_requests: whether request `r` concerns this rank now. */
#ifdef WITHOUT_ALL_RANKS_READ_REQUESTS
#define READS(r) (NEIGHBOR == (r) || (r) == me)
#else
#define READS(r) true
#endif
#define OWN(r) label[me * ITEMS + request_number[r]]
#define CAN_STOP(r)                                                                               \
    (published[r] && READS(r) && (handled[me] & (1 << (r))) == 0 &&                               \
     (difference[r] || DIFFER(OWN(r), request_label[r])))

inline answer(r) {
#ifdef WITHOUT_REQUEST_REMAINS
    published[r] = !difference[r];
#endif
    difference[r] = 1; /* compare_set: the first text remains */
    handled[me] = handled[me] | (1 << r);
    stopped[me] = 1
}

proctype monitor(byte me) {
    byte n;
end:
    do
    :: d_step { !gone[me] && (IS_NEW(0) || IS_NEW(ITEMS - 1)) ->
        for (n : 0 .. ITEMS - 1) { key[me * ITEMS + n] = label[me * ITEMS + n] }
        n = 0 }
    :: d_step { !gone[me] && !reserved[me] && (FOUND(0) || FOUND(ITEMS - 1)) ->
        n = (FOUND(0) -> 0 : ITEMS - 1);
        reserved[me] = 1;
#ifdef WITHOUT_REQUEST_HAS_NUMBER
        request_number[me] = 0;
#else
        request_number[me] = n;
#endif
        request_label[me] = label[me * ITEMS + n];
        n = 0 }
    :: d_step { !gone[me] && reserved[me] && !published[me] && !(handled[me] & (1 << me)) ->
        published[me] = 1 }
    :: d_step { !gone[me] && CAN_STOP(0) -> answer(0) }
    :: d_step { !gone[me] && CAN_STOP(1) -> answer(1) }
#if RANKS == 3
    :: d_step { !gone[me] && CAN_STOP(2) -> answer(2) }
#endif
    od
}

#define HAS_DIFFERENCE(a, b) (PAIR(a, b, 0) || PAIR(a, b, ITEMS - 1))
#define LIVE_DIFFERENCE(a, b) (!gone[a] && !gone[b] && HAS_DIFFERENCE(a, b))
#define IS_DONE(r) (gone[r] || stopped[r])
#define IS_STOPPED(r) (stopped[r])
#if RANKS == 2
#define ANY_PAIR(condition) (condition(0, 1))
#else
#define ANY_PAIR(condition) (condition(0, 1) || condition(0, 2) || condition(1, 2))
#endif

init {
    byte r;
    faults = FAULTS;
    atomic {
        for (r : 0 .. RANKS - 1) { run host(r); run monitor(r) }
    }
    /* No rank can act any more. */
    timeout;
    d_step {
        if
        :: ANY_PAIR(LIVE_DIFFERENCE) ->
#ifdef REACH_DIFFERENT
            assert(false)
#endif
            assert(ALL(IS_DONE))
        :: !ANY_PAIR(HAS_DIFFERENCE) -> assert(!ANY(IS_STOPPED))
        :: else
        fi
    }
end: false
}
