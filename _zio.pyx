# cython: language_level=3, boundscheck=False, wraparound=False
"""Native part of retainzfs: aligned buffers, CRC-32C, and I/O threads that never take the GIL.

An `Engine` owns two pools of POSIX threads: writers run appends, flushes, discards and the commands
of zoned block devices, readers run reads. A request is one `Job`: it goes from a queue to a thread
and from there to the list of completions, and while a thread runs it nobody else touches it. One
eventfd is readable when that list is not empty.

A `Request` owns the job and keeps its buffers alive; the engine refers to it from submission until
the result is collected.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EINTR, ENODATA, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.stdlib cimport posix_memalign
from posix.types cimport pid_t
from posix.uio cimport iovec, preadv, pwritev
from posix.unistd cimport close, fdatasync, getpid, read, write

import os
import signal

cdef extern from * nogil:
    r"""
    #include <endian.h>
    #include <fcntl.h>
    #include <linux/blkzoned.h>
    #include <linux/fs.h>
    #include <pthread.h>
    #include <stdlib.h>
    #include <sys/ioctl.h>

    #define ZIO_BLOCK 4096
    #define ZIO_POLY 0x82F63B78u  /* Castagnoli, reflected (RFC 3720, B.4) */

    static uint32_t zio_table[8][256];

    /* Slicing by 8 (Kounavis and Berry, 2005), byte by byte so that it has no byte order. */
    static uint32_t zio_crc_table(uint32_t c, const unsigned char *p, size_t n) {
        for (c = ~c; n >= 8; n -= 8, p += 8)
            c = zio_table[7][p[0] ^ (c & 255)] ^ zio_table[6][p[1] ^ ((c >> 8) & 255)]
              ^ zio_table[5][p[2] ^ ((c >> 16) & 255)] ^ zio_table[4][p[3] ^ (c >> 24)]
              ^ zio_table[3][p[4]] ^ zio_table[2][p[5]] ^ zio_table[1][p[6]] ^ zio_table[0][p[7]];
        for (; n; n--, p++) c = (c >> 8) ^ zio_table[0][(c ^ *p) & 255];
        return ~c;
    }

    static void zio_blocks_table(const unsigned char *p, size_t blocks, unsigned char *out) {
        for (; blocks; blocks--, p += ZIO_BLOCK, out += 4) {
            uint32_t c = htole32(zio_crc_table(0, p, ZIO_BLOCK));
            memcpy(out, &c, 4);
        }
    }

    static uint32_t (*zio_crc)(uint32_t, const unsigned char *, size_t) = zio_crc_table;
    static void (*zio_blocks)(const unsigned char *, size_t, unsigned char *) = zio_blocks_table;

    #if defined(__x86_64__)
    #define ZIO_SSE42 __attribute__((target("sse4.2")))
    typedef uint64_t __attribute__((aligned(1), may_alias)) zio_word;
    #define ZIO_STEP(c, p) __builtin_ia32_crc32di(c, *(const zio_word *)(p))

    ZIO_SSE42 static uint32_t zio_crc_sse42(uint32_t value, const unsigned char *p, size_t n) {
        uint64_t c = ~value;
        for (; n >= 8; n -= 8, p += 8) c = ZIO_STEP(c, p);
        for (; n; n--, p++) c = __builtin_ia32_crc32qi((uint32_t)c, *p);
        return ~(uint32_t)c;
    }

    /* The instruction has a latency of 3 cycles and issues every cycle: blocks are independent, so
       three at once keep it busy and need no combining of partial sums. */
    ZIO_SSE42 static void zio_blocks_sse42(const unsigned char *p, size_t blocks,
                                           unsigned char *out) {
        for (; blocks >= 3; blocks -= 3, p += 3 * ZIO_BLOCK, out += 12) {
            uint64_t a = 0xFFFFFFFFu, b = a, c = a;
            for (size_t i = 0; i < ZIO_BLOCK; i += 8) {
                a = ZIO_STEP(a, p + i);
                b = ZIO_STEP(b, p + ZIO_BLOCK + i);
                c = ZIO_STEP(c, p + 2 * ZIO_BLOCK + i);
            }
            uint32_t sums[3] = {~(uint32_t)a, ~(uint32_t)b, ~(uint32_t)c};
            memcpy(out, sums, sizeof sums);
        }
        for (; blocks; blocks--, p += ZIO_BLOCK, out += 4) {
            uint32_t c = zio_crc_sse42(0, p, ZIO_BLOCK);
            memcpy(out, &c, 4);
        }
    }
    #endif

    static int zio_init(void) {  /* returns whether the processor has the instruction */
        for (int k = 0; k < 8; k++)  /* table k: the sum of a byte with k zero bytes behind it */
            for (uint32_t n = 0; n < 256; n++) {
                uint32_t c = k ? zio_table[k - 1][n] : n;
                for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ ((c & 1) ? ZIO_POLY : 0);
                zio_table[k][n] = c;
            }
    #if defined(__x86_64__)
        if (__builtin_cpu_supports("sse4.2")) {
            zio_crc = zio_crc_sse42;
            zio_blocks = zio_blocks_sse42;
            return 1;
        }
    #endif
        return 0;
    }

    static int zio_discard(int fd, uint64_t offset, uint64_t length, int device) {
        uint64_t range[2] = {offset, length};
        int failed = device ? ioctl(fd, BLKDISCARD, range)
                            : fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                        (off_t)offset, (off_t)length);
        return failed ? errno : 0;
    }

    #define ZIO_SECTOR 512ull  /* the unit of the zone ioctls, whatever the device's blocks */

    static int zio_command(int fd, unsigned long request, uint64_t offset, uint64_t length) {
        struct blk_zone_range range = {offset / ZIO_SECTOR, length / ZIO_SECTOR};
        return ioctl(fd, request, &range) ? errno : 0;
    }

    typedef struct { uint64_t start, length, capacity, pointer; int type, condition; } zio_zone;

    /* Fills up to `count` zones from the one at byte `offset` on; returns how many, or -errno. */
    static int zio_report(int fd, uint64_t offset, unsigned count, zio_zone *zones) {
        struct blk_zone_report *report =
            calloc(1, sizeof *report + count * sizeof(struct blk_zone));
        if (!report) return -ENOMEM;
        report->sector = offset / ZIO_SECTOR;
        report->nr_zones = count;
        int got = ioctl(fd, BLKREPORTZONE, report) ? -errno : (int)report->nr_zones;
        for (int i = 0; i < got; i++) {
            const struct blk_zone *zone = &report->zones[i];
            /* Kernels before 5.9 do not tell the capacity, which is the length then. */
            uint64_t capacity = report->flags & BLK_ZONE_REP_CAPACITY ? zone->capacity : zone->len;
            zones[i] = (zio_zone){zone->start * ZIO_SECTOR, zone->len * ZIO_SECTOR,
                                  capacity * ZIO_SECTOR, zone->wp * ZIO_SECTOR,
                                  zone->type, zone->cond};
        }
        free(report);
        return got;
    }
    """
    ctypedef struct zio_zone:
        uint64_t start, length, capacity, pointer
        int type, condition
    ctypedef struct pthread_t: pass
    ctypedef struct pthread_mutex_t: pass
    ctypedef struct pthread_cond_t: pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_cond_init(pthread_cond_t *cond, void *attributes)
    int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
    int pthread_cond_signal(pthread_cond_t *cond)
    int pthread_cond_broadcast(pthread_cond_t *cond)
    int pthread_create(pthread_t *thread, void *attributes, void *(*run)(void *) noexcept nogil,
                       void *argument)
    int pthread_join(pthread_t thread, void **result)
    bint zio_init()
    uint32_t zio_crc(uint32_t value, const unsigned char *data, size_t length)
    uint32_t zio_crc_table(uint32_t value, const unsigned char *data, size_t length)
    void zio_blocks(const unsigned char *data, size_t blocks, unsigned char *out)
    void zio_blocks_table(const unsigned char *data, size_t blocks, unsigned char *out)
    int zio_discard(int fd, uint64_t offset, uint64_t length, bint device)
    int zio_command(int fd, unsigned long request, uint64_t offset, uint64_t length)
    int zio_report(int fd, uint64_t offset, unsigned count, zio_zone *zones)
    unsigned long BLKRESETZONE, BLKOPENZONE, BLKCLOSEZONE, BLKFINISHZONE

cdef enum:
    PAGE = 4096
    HEADER = 32
    TRAILER_SUMS = 1016         # (PAGE - HEADER) / 4
    MAX_THREADS = 64
    REPORT_ZONES = 4096         # of one call: 256 KiB of report

HARDWARE_CRC = zio_init()

RESET_ZONE = BLKRESETZONE
OPEN_ZONE = BLKOPENZONE
CLOSE_ZONE = BLKCLOSEZONE
FINISH_ZONE = BLKFINISHZONE


cdef class Slot:
    """`size` bytes of writable memory aligned to 4096, as O_DIRECT wants it (open(2)).

    Zero-filled, except with `clear=False`: for a buffer that is about to be read into.
    """

    cdef unsigned char *memory
    cdef Py_ssize_t size

    def __cinit__(self, Py_ssize_t size, bint clear=True):
        if size <= 0:
            raise ValueError(f"a slot of {size} bytes")
        if posix_memalign(<void **>&self.memory, PAGE, size):
            self.memory = NULL
            raise MemoryError(f"{size} bytes of aligned memory")
        self.size = size
        if clear:
            memset(self.memory, 0, size)

    def __dealloc__(self):
        free(self.memory)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 0, flags)


def crc32c(const unsigned char[::1] data not None, uint32_t value=0, *, bint portable=False):
    """CRC-32C (RFC 3720) of `data`, continuing from `value`, the sum of what came before;
    `portable` as on a processor without the instruction."""
    if data.shape[0] == 0:
        return value
    return (zio_crc_table if portable else zio_crc)(value, &data[0], data.shape[0])


def crc32c_blocks(const unsigned char[::1] data not None, *, bint portable=False):
    """CRC-32C of each 4096-byte block, 4 bytes little-endian each."""
    cdef Py_ssize_t blocks = data.shape[0] // PAGE
    if data.shape[0] % PAGE:
        raise ValueError(f"{data.shape[0]} bytes are not whole blocks")
    sums = PyBytes_FromStringAndSize(NULL, 4 * blocks)
    if blocks:
        (zio_blocks_table if portable else zio_blocks)(
            &data[0], blocks, <unsigned char *>PyBytes_AS_STRING(sums))
    return sums


def aligned(const unsigned char[::1] data not None):
    """Whether `data` starts at a multiple of 4096 in memory."""
    return data.shape[0] == 0 or <uintptr_t>&data[0] % PAGE == 0


def report_zones(int fd, int64_t offset, int count):
    """Up to `count` zones of a zoned block device from the one at byte `offset` on, each as
    (start, length, capacity, write pointer, type, condition); the first four in bytes, the pointer
    from the start of the device, the others as in linux/blkzoned.h. Raises OSError."""
    cdef int got, i, wanted
    cdef zio_zone *zone
    cdef zio_zone *zones = <zio_zone *>calloc(REPORT_ZONES, sizeof(zio_zone))
    cdef list found = []
    if zones == NULL:
        raise MemoryError("the report of zones")
    try:
        while len(found) < count:
            wanted = min(REPORT_ZONES, count - <int>len(found))
            with nogil:
                got = zio_report(fd, offset, wanted, zones)
            if got < 0:
                raise OSError(-got, os.strerror(-got))
            if got == 0:
                break
            for i in range(got):
                zone = &zones[i]
                found.append((zone.start, zone.length, zone.capacity, zone.pointer, zone.type,
                              zone.condition))
            offset = zones[got - 1].start + zones[got - 1].length
    finally:
        free(zones)
    return found


cdef enum Operation:
    WRITE, FLUSH, DISCARD, COMMAND, READ

cdef struct Job:
    Operation operation
    int fd
    bint device                 # DISCARD: fd is a block device
    unsigned long request       # COMMAND: of ioctl(2)
    int64_t offset
    unsigned char *data
    uint64_t length
    unsigned char *sums         # WRITE and READ: crc32c of every block, computed here
    const unsigned char *expected   # READ: what they should be, or NULL
    unsigned char *trailer      # WRITE: one block, or NULL
    int64_t value               # WRITE: sum of the trailer; READ: first bad block, or -1
    int error                   # errno, 0 on success
    Job *next
    PyObject *owner

cdef struct Jobs:               # first in, first out
    Job *first
    Job *last

cdef void push(Jobs *jobs, Job *job) noexcept nogil:
    job.next = NULL
    if jobs.first == NULL:
        jobs.first = job
    else:
        jobs.last.next = job
    jobs.last = job

cdef Job *pop(Jobs *jobs) noexcept nogil:
    cdef Job *job = jobs.first
    if job != NULL:
        jobs.first = job.next
    return job

cdef int transfer(Job *job) noexcept nogil:
    """preadv(2) or pwritev(2) until all is moved; 0 or errno, ENODATA at the end of the file."""
    cdef iovec[2] both
    cdef iovec *parts = both
    cdef int count = 1 if job.trailer == NULL else 2
    cdef int64_t offset = job.offset
    cdef ssize_t moved
    both[0].iov_base, both[0].iov_len = job.data, job.length
    both[1].iov_base, both[1].iov_len = job.trailer, PAGE
    while count:
        moved = (preadv if job.operation == READ else pwritev)(job.fd, parts, count, offset)
        if moved < 0 and errno == EINTR:
            continue
        if moved <= 0:
            return errno if moved else ENODATA
        offset += moved
        while count and <size_t>moved >= parts.iov_len:
            moved -= parts.iov_len
            parts += 1
            count -= 1
        if count:
            parts.iov_base = <char *>parts.iov_base + moved
            parts.iov_len -= moved
    return 0

cdef int run_write(Job *job) noexcept nogil:
    zio_blocks(job.data, job.length // PAGE, job.sums)
    if job.trailer != NULL:
        memcpy(job.trailer + HEADER, job.sums, 4 * (job.length // PAGE))
        job.value = zio_crc(0, job.trailer, PAGE)
    return transfer(job)

cdef int run_read(Job *job) noexcept nogil:
    cdef uint64_t block
    cdef int error = transfer(job)
    job.value = -1
    if error == 0:
        zio_blocks(job.data, job.length // PAGE, job.sums)
    if error == 0 and job.expected != NULL:
        for block in range(job.length // PAGE):
            if memcmp(job.sums + 4 * block, job.expected + 4 * block, 4) != 0:
                job.value = block
                break
    return error

cdef void run(Job *job) noexcept nogil:
    if job.operation == WRITE:
        job.error = run_write(job)
    elif job.operation == READ:
        job.error = run_read(job)
    elif job.operation == FLUSH:
        job.error = errno if fdatasync(job.fd) else 0
    elif job.operation == COMMAND:
        job.error = zio_command(job.fd, job.request, job.offset, job.length)
    else:
        job.error = zio_discard(job.fd, job.offset, job.length, job.device)


cdef class Request:
    """A job with what its thread needs kept alive."""

    cdef Job job
    cdef Py_buffer view
    cdef object token
    cdef bytes sums, expected
    cdef Slot trailer

    def __cinit__(self, object token, int fd, int64_t offset):
        self.token = token
        self.sums = b""
        self.job.fd = fd
        self.job.offset = offset
        self.job.owner = <PyObject *>self

    def __dealloc__(self):
        PyBuffer_Release(&self.view)  # nothing if there is none

    cdef int hold(self, object data, int flags) except -1:
        PyObject_GetBuffer(data, &self.view, flags)
        if self.view.len == 0 or self.view.len % PAGE:
            raise ValueError(f"{self.view.len} bytes are not whole blocks")
        self.job.data = <unsigned char *>self.view.buf
        self.job.length = self.view.len
        self.sums = PyBytes_FromStringAndSize(NULL, 4 * (self.view.len // PAGE))
        self.job.sums = <unsigned char *>PyBytes_AS_STRING(self.sums)
        return 0


cdef struct Done:               # shared by both pools
    pthread_mutex_t lock
    Jobs jobs
    int event

cdef struct Pool:
    pthread_mutex_t lock
    pthread_cond_t wake
    Jobs queue
    bint stopping
    int threads
    pthread_t ids[MAX_THREADS]
    Done *done

cdef void *work(void *argument) noexcept nogil:
    cdef Pool *pool = <Pool *>argument
    cdef uint64_t one = 1
    cdef bint first
    while True:
        pthread_mutex_lock(&pool.lock)
        while pool.queue.first == NULL and not pool.stopping:
            pthread_cond_wait(&pool.wake, &pool.lock)
        job = pop(&pool.queue)
        pthread_mutex_unlock(&pool.lock)
        if job == NULL:
            return NULL
        run(job)
        pthread_mutex_lock(&pool.done.lock)
        first = pool.done.jobs.first == NULL
        push(&pool.done.jobs, job)
        pthread_mutex_unlock(&pool.done.lock)
        if first:
            write(pool.done.event, &one, sizeof(one))

cdef int start_pool(Pool *pool, Done *done, int threads) except -1:
    pool.done = done
    pthread_mutex_init(&pool.lock, NULL)
    pthread_cond_init(&pool.wake, NULL)
    while pool.threads < threads:
        error = pthread_create(&pool.ids[pool.threads], NULL, work, pool)
        if error:
            raise OSError(error, f"cannot start an I/O thread: {os.strerror(error)}")
        pool.threads += 1
    return 0

cdef void stop_pool(Pool *pool) noexcept nogil:
    """Let the threads empty the queue, and join them."""
    pthread_mutex_lock(&pool.lock)
    pool.stopping = True
    pthread_cond_broadcast(&pool.wake)
    pthread_mutex_unlock(&pool.lock)
    while pool.threads:
        pool.threads -= 1
        pthread_join(pool.ids[pool.threads], NULL)


cdef class Engine:
    """Threads that write and read; `completions` collects the results.

    Threads do not survive a fork: create the engine in the process that uses it.
    """

    cdef Pool writers
    cdef Pool readers
    cdef Done done
    cdef pid_t process
    cdef readonly int pending   # submitted, result not yet collected
    cdef readonly bint closed

    def __cinit__(self, int writers, int readers):
        if not (0 < writers <= MAX_THREADS and 0 < readers <= MAX_THREADS):
            raise ValueError(f"{writers} writers and {readers} readers; 1 to {MAX_THREADS} each")
        pthread_mutex_init(&self.done.lock, NULL)
        self.done.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.process = getpid()
        # Threads inherit the mask. Signals are for Python's main thread, so these block them all.
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            start_pool(&self.writers, &self.done, writers)
            start_pool(&self.readers, &self.done, readers)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __dealloc__(self):
        if self.process:
            self.close()
            self.completions()

    cdef int submit(self, Pool *pool, Request request, Operation operation) except -1:
        if self.closed:
            raise ValueError("the engine is closed")
        request.job.operation = operation
        Py_INCREF(request)
        self.pending += 1
        pthread_mutex_lock(&pool.lock)
        push(&pool.queue, &request.job)
        pthread_cond_signal(&pool.wake)
        pthread_mutex_unlock(&pool.lock)
        return 0

    def fileno(self):
        """The eventfd: readable when `completions` has something to return."""
        return self.done.event

    def submit_append(self, object token, int fd, int64_t offset, object data,
                      const unsigned char[::1] header not None=b""):
        """Write `data` (whole blocks), and behind it, when there is a header (32 bytes), a trailer
        block: header, the crc32c of every block, zeros. One pwritev."""
        cdef Request request = Request(token, fd, offset)
        request.hold(data, PyBUF_SIMPLE)
        if header.shape[0]:
            if header.shape[0] != HEADER or request.job.length > TRAILER_SUMS * PAGE:
                raise ValueError(f"a trailer for {len(data)} bytes with {len(header)} of header")
            request.trailer = Slot(PAGE)
            request.job.trailer = request.trailer.memory
            memcpy(request.job.trailer, &header[0], HEADER)
        self.submit(&self.writers, request, WRITE)

    def submit_flush(self, object token, int fd):
        """fdatasync(2)."""
        self.submit(&self.writers, Request(token, fd, 0), FLUSH)

    def submit_discard(self, object token, int fd, int64_t offset, uint64_t length,
                       bint device=False):
        """Give `length` bytes back: a hole in a file (fallocate(2)), BLKDISCARD on a device."""
        cdef Request request = Request(token, fd, offset)
        request.job.length = length
        request.job.device = device
        self.submit(&self.writers, request, DISCARD)

    def submit_command(self, object token, int fd, unsigned long request, int64_t offset,
                       uint64_t length):
        """RESET_ZONE, OPEN_ZONE, CLOSE_ZONE or FINISH_ZONE for all zones of a range of bytes."""
        cdef Request command = Request(token, fd, offset)
        command.job.length = length
        command.job.request = request
        self.submit(&self.writers, command, COMMAND)

    def submit_read(self, object token, int fd, int64_t offset, object buffer, bytes sums=b""):
        """Fill `buffer` (whole blocks); `sums` are what the crc32c of every block should be.
        Error ENODATA where the file ends too early."""
        cdef Request request = Request(token, fd, offset)
        request.hold(buffer, PyBUF_WRITABLE)
        if sums:
            if len(sums) != len(request.sums):
                raise ValueError(f"{len(sums)} bytes of sums for {len(buffer)} bytes")
            request.expected = sums
            request.job.expected = <unsigned char *>PyBytes_AS_STRING(sums)
        self.submit(&self.readers, request, READ)

    cpdef list completions(self):
        """What has finished since the last call: (token, errno or 0, sums of the blocks, value);
        the value is the crc32c of the trailer (append) or the first bad block, or -1 (read)."""
        cdef list finished = []
        cdef uint64_t count
        cdef Jobs jobs
        cdef Request request
        # The event is cleared before the list is taken: what comes in between wakes us again.
        if not self.closed:
            read(self.done.event, &count, sizeof(count))
        pthread_mutex_lock(&self.done.lock)
        jobs = self.done.jobs
        self.done.jobs.first = NULL
        pthread_mutex_unlock(&self.done.lock)
        while jobs.first != NULL:
            request = <Request>pop(&jobs).owner
            sums = b"" if request.job.error else request.sums
            finished.append((request.token, request.job.error, sums, request.job.value))
            self.pending -= 1
            Py_DECREF(request)
        return finished

    cpdef close(self):
        """Finish what was submitted and join the threads; `completions` still returns results."""
        if self.closed:
            return
        self.closed = True
        if getpid() == self.process:  # a forked child has the engine, but not its threads
            with nogil:
                stop_pool(&self.writers)
                stop_pool(&self.readers)
        close(self.done.event)
        self.done.event = -1
