/* The negotiation of a process group: csrc/transport/negotiation.c, over gloo's collectives.
 *
 * A rank is a process with the locals `me` (its rank), `pg` (the process group of the current call)
 * and `err`. An inline that fails sets `err`, as the C function returns -1. The file that includes
 * this one sets RANKS, PROCESS_GROUPS, MAY_REACH_GLOO and TIME_LIMIT_ENDS_WAITS.
 *
 * Gloo's collectives of a process group match by their order of issue. A collective completes if
 * all ranks have issued it, and fails if a rank has ended before it issued it. */
#include "ranks.pml"

#define X (me * PROCESS_GROUPS + pg)
#define OF(r) ((r) * PROCESS_GROUPS + pg)
#if RANKS == 2
#define LARGEST(a) (a[OF(0)] > a[OF(1)] -> a[OF(0)] : a[OF(1)])
#else
#define LARGER(a, b) (a > b -> a : b)
#define LARGEST(a) LARGER(a[OF(0)], LARGER(a[OF(1)], a[OF(2)]))
#endif

/* Kinds of gloo's collectives: a round, or KIND_OF_OP + the tag of a gather or a reduction. */
#define KIND_ROUND_1 1
#define KIND_ROUND_2 2
#define KIND_PLAN 3
#define KIND_OF_OP 4

#define NX (RANKS * PROCESS_GROUPS)
#define WINDOW 8 /* collectives by which a rank may be ahead */

byte gloo_count[NX]; /* collectives that a rank has issued over gloo */
byte gloo_kind[PROCESS_GROUPS * WINDOW];
bit gloo_broken;     /* collectives of different kinds met: gloo ends the process */
bit shifted;         /* a rank left out or repeated a collective */
bit diverged;        /* a rank issued another collective, or has another plan */

/* ---- gloo ---- */

#define HAS_ISSUED(r) (gloo_count[OF(r)] > index)
#define IS_LOST(r) (gone[r] && gloo_count[OF(r)] <= index)

/* Issues a collective. `index` is its number. */
inline gloo_issue(kind) {
    d_step {
        assert(MAY_REACH_GLOO(kind));
        index = gloo_count[X];
        gloo_count[X]++;
        if
        :: gloo_kind[pg * WINDOW + index % WINDOW] == 0 ->
            gloo_kind[pg * WINDOW + index % WINDOW] = kind
        :: else ->
            if
            :: gloo_kind[pg * WINDOW + index % WINDOW] != kind ->
                /* gloo would end the process by a signal */
                assert(shifted || diverged);
                gloo_broken = 1
            :: else
            fi
        fi;
        if
        :: ALL(HAS_ISSUED) -> gloo_kind[pg * WINDOW + index % WINDOW] = 0
        :: else
        fi
    }
}

/* fct_exchange_wait, fct_work_wait: waits for collective `awaited` of gloo. */
inline gloo_wait(awaited) {
    index = awaited;
    if
    :: atomic { gone[me] -> index = 0; err = DEATH }
    :: atomic { !gone[me] && signaled[me] -> signaled[me] = 0; index = 0; err = INTERRUPT }
    :: atomic { !gone[me] && ALL(HAS_ISSUED) && !gloo_broken -> index = 0 }
    :: atomic { !gone[me] && (gloo_broken || (!ALL(HAS_ISSUED) && ANY(IS_LOST))) ->
        index = 0;
        err = CLOSED }
    :: atomic { timeout && TIME_LIMIT_ENDS_WAITS -> index = 0; err = CLOSED }
    fi
}

/* ---- negotiation ---- */

#define PENDING 0
#define CONNECTING 1
#define ACCEPTED 2
#define DECLINED 3

/* This rank's part of round 1 and round 2. */
byte registered[NX]; /* parameter groups */
bit accepts[NX];
bit connects[NX];
byte plan[NX]; /* hash of the first plan; 0: none */
bit waits[NX];

/* struct shm_negotiation */
byte state[NX];
byte gathers[NX];
byte fallback_gathers[NX];
byte connected_after[NX];
byte capabilities[NX]; /* number of round 1 in gloo's order; NONE: not issued, or read */
byte connection[NX];   /* of round 2 */
bit compares[NX];
bit compares_later_plans[NX];
bit has_first_result[NX];
bit first_differs[NX];

#define ACCEPTS(r) accepts[OF(r)]
#define WAITS(r) waits[OF(r)]
#define HAS_PLAN(r) (plan[OF(r)] != 0)
#define DIFFERS(r) (plan[OF(r)] != 0 && plan[OF(0)] != 0 && plan[OF(r)] != plan[OF(0)])
#define CONNECTS(r) connects[OF(r)]
#define HAS_ENDED(r) gone[r]

/* start_negotiation */
inline start_negotiation() {
    gloo_issue(KIND_ROUND_1);
    d_step {
        capabilities[X] = index;
        fallback_gathers[X] = registered[X];
        index = 0
    }
}

/* read_capabilities: waits for round 1 and applies its results. */
inline read_capabilities() {
    gloo_wait(capabilities[X]);
    if
    :: err == 0 ->
        d_step {
            capabilities[X] = NONE;
#ifndef WEAK_FALLBACK_IS_LARGEST
            fallback_gathers[X] = LARGEST(registered);
#endif
            if
#ifdef WEAK_ALL_RANKS_WAIT
            :: waits[X] -> fallback_gathers[X] = 0
#else
            :: ALL(WAITS) -> fallback_gathers[X] = 0
#endif
            :: else
            fi;
            compares[X] = ALL(HAS_PLAN);
            compares_later_plans[X] = ALL(HAS_PLAN) && ALL(WAITS);
            has_first_result[X] = 1;
#ifndef WEAK_PLAN_IS_COMPARED
            first_differs[X] = ANY(DIFFERS);
#endif
            if
            :: ALL(ACCEPTS) -> state[X] = CONNECTING
            :: else -> state[X] = DECLINED
            fi
        }
#ifdef WEAK_INTERRUPTED_ROUND_IS_KEPT
    :: err == INTERRUPT -> capabilities[X] = NONE
#endif
    :: else
    fi
}

/* connect_ranks: maps the peers' rings and issues round 2. */
inline connect_ranks() {
    d_step {
        if
        :: ANY(HAS_ENDED) -> connects[X] = 0
        :: else
        fi;
        connected_after[X] = gathers[X] + fallback_gathers[X]
    }
    gloo_issue(KIND_ROUND_2);
    d_step {
        connection[X] = index;
        index = 0
    }
}

/* read_connection: waits for round 2 and applies its results. */
inline read_connection() {
    gloo_wait(connection[X]);
    if
    :: err == 0 ->
        d_step {
            connection[X] = NONE;
            if
#ifdef WEAK_ALL_RANKS_CONNECT
            :: connects[X] -> state[X] = ACCEPTED
#else
            :: ALL(CONNECTS) -> state[X] = ACCEPTED
#endif
            :: else -> state[X] = DECLINED
            fi
        }
    :: else
    fi
}

/* fallback_gathers while pending is this rank's own number. */
#define OWN_FALLBACK (capabilities[X] != NONE -> registered[X] : fallback_gathers[X])
#ifdef WEAK_ROUNDS_ARE_READ_LATE
#define MAY_READ_1 true
#define MAY_READ_2(gather) true
#else
#define MAY_READ_1 (gathers[X] >= OWN_FALLBACK)
#define MAY_READ_2(gather) (!(gather && gathers[X] < connected_after[X]))
#endif

/* shm_negotiation_run before a gather (`gather`) or a reduction. */
inline run_negotiation(gather) {
    if
    :: err == 0 && state[X] == PENDING && capabilities[X] == NONE -> start_negotiation()
    :: else
    fi;
    if
    :: err == 0 && state[X] == PENDING && (!(gather) || MAY_READ_1) -> read_capabilities()
    :: else
    fi;
    if
    :: err == 0 && state[X] == CONNECTING && connection[X] == NONE &&
       !(gather && gathers[X] < fallback_gathers[X]) -> connect_ranks()
    :: else
    fi;
    if
    :: err == 0 && state[X] == CONNECTING && connection[X] != NONE && (gather) &&
       MAY_READ_2(gather) -> read_connection()
    :: else
    fi
}

/* settle_rounds */
inline settle_rounds() {
    if
    :: state[X] == PENDING -> read_capabilities()
    :: else
    fi;
    if
    :: err == 0 && state[X] == CONNECTING && fallback_gathers[X] == 0 ->
        if
        :: connection[X] == NONE -> connect_ranks()
        :: else
        fi;
        read_connection()
    :: else
    fi
}

#ifdef SECOND_ROOT
byte later_plan[NX]; /* number of the exchange of the second root's plan; NONE: not issued */

/* compare_later_plan */
inline compare_later_plan(rank_waits) {
    if
    :: !compares_later_plans[X] || state[X] == ACCEPTED -> equal = 1
    :: else ->
        if
        :: later_plan[X] == NONE -> gloo_issue(KIND_PLAN); later_plan[X] = index; index = 0
        :: else
        fi;
        if
        :: rank_waits -> gloo_wait(later_plan[X]); equal = (err == 0)
        :: else
        fi
    fi
}
#else
#define compare_later_plan(rank_waits) skip
#endif

/* shm_negotiation_compare_plan. `is_first`: the plan of round 1. Sets `equal` if the plans are
 * equal or are not compared, and `err` to PLAN if they differ. Sets neither before the results
 * arrive. */
inline compare_plan(is_first, rank_waits) {
    equal = 0;
    if
    :: state[X] == PENDING && capabilities[X] == NONE -> start_negotiation()
    :: else
    fi;
    if
    :: capabilities[X] != NONE && !(rank_waits) && (is_first)
#ifndef WEAK_LATER_PLAN_NEEDS_WAITS
    :: !(is_first) && !waits[X] -> equal = 1
#endif
    :: else ->
        settle_rounds();
        if
        :: err == 0 && !(is_first) -> compare_later_plan(rank_waits)
        :: err == 0 && (is_first) && plan[X] != 0 && compares[X] && first_differs[X] -> err = PLAN
        :: err == 0 && (is_first) && !(plan[X] != 0 && compares[X] && first_differs[X]) -> equal = 1
        :: else
        fi
    fi
}

/* fct_pg_all_gather and others over gloo. */
inline count_gather() {
    gathers[X]++
}
