"""A process that takes file locks on order, one line per order, and answers each with one line.

open NAME PATH [read|write] close NAME     dup NAME NEW     reset: close all
size NAME                                   the size of the file
lock NAME KIND MODE [START LENGTH] [wait]   KIND: flock, posix, ofd; MODE: shared, exclusive, none
test NAME KIND MODE START LENGTH            the lock that conflicts: "free" or "MODE START LENGTH"
fork                                        make a child that keeps the open files; its process id

The answer is "ok", the result of `size`, `test` or `fork`, or the name of an error. SIGUSR1 interrupts a wait.
"""

import errno
import fcntl
import os
import select
import signal
import struct
import sys

MODES = {"shared": fcntl.F_RDLCK, "exclusive": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}
FLOCKS = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX, "none": fcntl.LOCK_UN}
SET = {"posix": (fcntl.F_SETLK, fcntl.F_SETLKW), "ofd": (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)}
GET = {"posix": fcntl.F_GETLK, "ofd": fcntl.F_OFD_GETLK}
LAYOUT = "hhxxxxqqixxxx"

ACCESS = {"read": os.O_RDONLY, "write": os.O_WRONLY}
files = {}


def interrupted(_signal, _frame):
    # Python repeats an interrupted call unless the handler raises an exception.
    raise InterruptedError(errno.EINTR, "interrupted")


def lock(name, kind, mode, *options):
    wait = "wait" in options
    start, length = [int(word) for word in options if word != "wait"] or [0, 0]
    if kind == "flock":
        fcntl.flock(files[name], FLOCKS[mode] | (0 if wait else fcntl.LOCK_NB))
    else:
        fcntl.fcntl(files[name], SET[kind][wait], struct.pack(LAYOUT, MODES[mode], 0, start, length, 0))
    return "ok"


def test(name, kind, mode, start, length):
    wanted = struct.pack(LAYOUT, MODES[mode], 0, int(start), int(length), 0)
    conflict, _, start, length, _ = struct.unpack(LAYOUT, fcntl.fcntl(files[name], GET[kind], wanted))
    mode = next(mode for mode, number in MODES.items() if number == conflict)
    return "free" if mode == "none" else f"{mode} {start} {length}"


def do(order, *words):
    if order == "open":
        name, path, *access = words
        files[name] = os.open(path, ACCESS[access[0]] if access else os.O_RDWR | os.O_CREAT, 0o644)
    elif order == "size":
        return str(os.fstat(files[words[0]]).st_size)
    elif order == "close":
        os.close(files.pop(words[0]))
    elif order == "dup":
        files[words[1]] = os.dup(files[words[0]])
    elif order == "lock":
        return lock(*words)
    elif order == "test":
        return test(*words)
    elif order == "fork":
        child = os.fork()
        if child == 0:
            # The process ends when the pipe of orders is closed.
            os.close(1)
            orders = select.poll()
            orders.register(0, 0)
            orders.poll()
            os._exit(0)
        return str(child)
    elif order == "reset":
        while files:
            os.close(files.popitem()[1])
    return "ok"


signal.signal(signal.SIGUSR1, interrupted)
for line in iter(sys.stdin.readline, ""):
    try:
        answer = do(*line.split())
    except OSError as error:
        answer = errno.errorcode[error.errno]
    print(answer, flush=True)
