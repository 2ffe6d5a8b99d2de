/* The messages of shared memory: csrc/transport/shm_transport.c over the rings of shm_ring.c.
 *
 * The file that includes this one sets RANKS, CAPACITY and TIME_LIMIT_ENDS_WAITS. Its ranks have
 * the locals of `proctype rank` in steps.pml. */

/* An operation: unit, kind, parameters, plan, and whether its label is known. */
#define UNIT(op) ((op) & 3)
#define IS_REDUCE(op) ((op) & 4)
#define OTHER_PARAMS 8
#define OTHER_PLAN 16
#define LABELED 32
/* Units 0 and 1 have the same size. */
#define TAG(op) (IS_REDUCE(op) + (UNIT(op) == 2 -> 1 : 0))
#define HAS_TAG_OF(a, b) (TAG(a) == TAG(b))
#define HAS_LABEL_OF(a, b) (!((a) & LABELED) || !((b) & LABELED) || (a) == (b))

#ifdef WITHOUT_TAG_IS_COMPARED
#define TAGS_MATCH(a, b) true
#else
#define TAGS_MATCH(a, b) HAS_TAG_OF(a, b)
#endif
#ifdef WITHOUT_LABEL_IS_COMPARED
#define LABELS_MATCH(a, b) true
#else
#define LABELS_MATCH(a, b) HAS_LABEL_OF(a, b)
#endif

/* ---- shared memory: the segment of each rank ---- */

byte committed[RANKS], released[RANKS];
bit closed[RANKS];
byte header[RANKS * CAPACITY]; /* the operation of a message */
byte content[RANKS * CAPACITY]; /* the number of the message whose data is in this slot */
#define SLOT(r, message) ((r) * CAPACITY + (message) % CAPACITY)

byte mismatch; /* 1 + the number of the first message whose labels differ; 0: none */

/* ---- shm_transport.c ---- */

#define PEER(distance) ((me + (distance)) % RANKS)
#define QUEUE 4 /* operations in flight */
#define OWN(message) own[(message) % QUEUE]

/* shm_ring_seq */
#if RANKS == 2
#define SEQ (committed[PEER(1)] + released[PEER(1)] + closed[PEER(1)])
#define LEAST_RELEASED released[PEER(1)]
#else
#define SEQ (committed[PEER(1)] + released[PEER(1)] + closed[PEER(1)] + \
             committed[PEER(2)] + released[PEER(2)] + closed[PEER(2)])
#define LEAST_RELEASED (released[PEER(1)] < released[PEER(2)] -> released[PEER(1)] : released[PEER(2)])
#endif
#ifdef WITHOUT_FULL_RING_IS_NOT_WRITTEN
#define HAS_SPACE true
#else
#define HAS_SPACE (written - LEAST_RELEASED < CAPACITY)
#endif
#define CAN_WRITE (written - dropped < queued && HAS_SPACE)

/* write_next: shm_ring_reserve and shm_ring_commit. */
inline write_next() {
    d_step {
        op = OWN(written - dropped);
        header[SLOT(me, written)] = op;
        content[SLOT(me, written)] = written;
        committed[me]++;
        distance = 1;
        do
        :: distance < RANKS ->
            if
            :: committed[PEER(distance)] > written &&
               !HAS_LABEL_OF(op, header[SLOT(PEER(distance), written)]) ->
                mismatch = (mismatch == 0 -> written + 1 : mismatch)
            :: else
            fi;
            distance++
        :: else -> break
        od;
        written++;
        op = 0;
        distance = 0
    }
}

/* fail_all */
inline fail_all(reason) {
    d_step {
        failed = reason;
#ifndef WITHOUT_FAILED_RANK_CLOSES
        closed[me] = 1;
#endif
        queued = 0;
        read = 0;
        written = 0;
        dropped = 0
    }
}

#ifdef WITHOUT_ALL_HEADERS_ARE_READ
#define STOP_AT_CLOSED break
#else
#define STOP_AT_CLOSED skip
#endif

#define SHOWS_ANOTHER_LABEL(r) \
    (committed[r] > read && !HAS_LABEL_OF(OWN(read), header[SLOT(r, read)]))

/* find_missing_peer. Sets `found` to an error, or `missing` to a rank (NONE: no rank). The order of
 * the reads of shm_ring_peek matters, so each is a step. */
inline find_missing_peer() {
    d_step {
        found = 0;
        missing = NONE;
        distance = 1;
#if RANKS == 3
        differs = SHOWS_ANOTHER_LABEL(PEER(1)) || SHOWS_ANOTHER_LABEL(PEER(2))
#endif
    }
    do
    :: distance < RANKS ->
#ifdef WITHOUT_CLOSED_IS_READ_FIRST
        has_message = committed[PEER(distance)] > read;
        is_closed = closed[PEER(distance)];
#else
        is_closed = closed[PEER(distance)];
        has_message = committed[PEER(distance)] > read;
#endif
        d_step {
            if
            :: !has_message && is_closed -> found = CLOSED
            :: !has_message && !is_closed -> missing = (missing == NONE -> PEER(distance) : missing)
            :: has_message && TAGS_MATCH(OWN(read), header[SLOT(PEER(distance), read)]) &&
               LABELS_MATCH(OWN(read), header[SLOT(PEER(distance), read)])
            :: else -> found = MISMATCH
            fi
        }
        if
        :: found == MISMATCH -> break
        :: found == CLOSED -> STOP_AT_CLOSED
        :: else
        fi;
        distance++
    :: else -> break
    od;
#if RANKS == 3
    /* A closed peer hides no mismatch. */
    assert(!(differs && found == CLOSED));
#endif
    atomic { is_closed = 0; has_message = 0; distance = 0; differs = 0 }
}

/* shm_op_methods.read: uses the data of all peers. */
inline use_messages() {
    d_step {
        distance = 1;
        do
        :: distance < RANKS ->
            assert(content[SLOT(PEER(distance), read)] == read);
            assert(HAS_TAG_OF(OWN(read), header[SLOT(PEER(distance), read)]));
            assert(HAS_LABEL_OF(OWN(read), header[SLOT(PEER(distance), read)]));
            distance++
        :: else -> break
        od;
        distance = 0
    }
}

/* shm_ring_release */
inline release() {
    d_step {
        released[me]++;
        read++
    }
}

/* read_next, after find_missing_peer has found the messages of all peers. */
inline read_next() {
#ifdef WITHOUT_RELEASE_FOLLOWS_READ
    released[me]++;
    use_messages();
    read++
#else
    use_messages();
    release()
#endif
}

/* A rank writes first, and reads a message only after it has written its own. */
#ifdef WITHOUT_MESSAGE_IS_COMMITTED_FIRST
#define MAY_READ (read < queued)
#define NEED_NOT_WRITE MAY_READ || !CAN_WRITE
#define MAY_WRITE_INSTEAD CAN_WRITE
#else
#define MAY_READ (read < written - dropped)
#define NEED_NOT_WRITE else
#define MAY_WRITE_INSTEAD false
#endif

/* shm_ring_peer_has_ended: the system call that tests the lock of a process. */
#ifdef WITHOUT_PEER_IS_TESTED
#define PEER_HAS_ENDED(r) closed[r]
#else
#define PEER_HAS_ENDED(r) (closed[r] || gone[r])
#endif

/* shm_ring_slowest_reader */
#if RANKS == 2
#define SLOWEST_READER PEER(1)
#else
#define SLOWEST_READER (released[PEER(2)] < released[PEER(1)] -> PEER(2) : PEER(1))
#endif

/* check_peers: fails all operations if the rank that is waited for has ended. */
inline check_peers() {
    if
    :: MAY_READ -> find_missing_peer()
    :: else -> missing = SLOWEST_READER
    fi;
    if
    :: found != 0 -> fail_all(found)
    :: found == 0 && missing != NONE && PEER_HAS_ENDED(missing) ->
#ifdef WITHOUT_COUNTERS_ARE_READ_AGAIN
        fail_all(CLOSED)
#else
        if
        :: SEQ == seen_seq -> fail_all(CLOSED)
        :: else
        fi
#endif
    :: else
    fi
}

/* shm_transport_wait, for message `last`. */
inline wait_for_message(last) {
    do
    :: gone[me] -> err = DEATH; break
    :: !gone[me] && failed != 0 -> err = failed; break
    :: !gone[me] && failed == 0 && read > last -> break
    :: !gone[me] && failed == 0 && read <= last ->
        seen_seq = SEQ;
        found = 0;
        missing = NONE;
        if
        :: CAN_WRITE -> write_next()
        :: NEED_NOT_WRITE ->
            if
            :: MAY_READ -> find_missing_peer()
            :: else -> missing = SLOWEST_READER
            fi;
            if
            :: found != 0 -> fail_all(found)
            :: found == 0 && missing == NONE -> read_next()
            :: found == 0 && missing != NONE ->
                /* shm_ring_wait sleeps until a counter changes, for at most 0.1 s */
                if
                :: SEQ != seen_seq || MAY_WRITE_INSTEAD
                :: atomic { SEQ == seen_seq && PEER_HAS_ENDED(missing) } -> check_peers()
#ifdef FINE
                :: atomic { SEQ == seen_seq && !has_checked -> has_checked = 1 } -> check_peers()
#endif
                :: atomic { timeout && TIME_LIMIT_ENDS_WAITS } -> fail_all(CLOSED)
                :: atomic { signaled[me] -> signaled[me] = 0; err = INTERRUPT }; break
                :: gone[me]
                fi
            fi
        fi
    od;
    atomic { seen_seq = 0; found = 0; missing = 0; distance = 0 }
}

/* shm_transport_submit */
inline submit(submitted) {
    if
    :: failed != 0 -> err = failed
    :: else ->
        d_step { OWN(queued) = submitted; queued++ }
#ifndef WITHOUT_MESSAGE_IS_COMMITTED_FIRST
        do
        :: CAN_WRITE -> write_next()
        :: else -> break
        od
#endif
    fi
}
