"""A process that appends records to a file, each under a lock: appender.py PATH KIND HOW NAME COUNT

KIND: flock, posix, ofd, of the whole file. HOW finds the end of the file: seek, stat. Under each lock, the process also reads the
file through a descriptor that only reads, and fails if that is not what a holder of the lock must see.
"""

import fcntl
import os
import struct
import sys

path, kind, how, name, count = sys.argv[1:]
LAYOUT = "hhxxxxqqixxxx"
WIDTH = 16

writer, reader = os.open(path, os.O_WRONLY), os.open(path, os.O_RDONLY)


def lock(mode):
    if kind == "flock":
        fcntl.flock(writer, fcntl.LOCK_EX if mode == fcntl.F_WRLCK else fcntl.LOCK_UN)
    else:
        command = fcntl.F_SETLKW if kind == "posix" else fcntl.F_OFD_SETLKW
        fcntl.fcntl(writer, command, struct.pack(LAYOUT, mode, 0, 0, 0, 0))


for number in range(int(count)):
    lock(fcntl.F_WRLCK)
    end = os.lseek(writer, 0, os.SEEK_END) if how == "seek" else os.fstat(writer).st_size
    # The last records are those of the last holder of the lock.
    last = os.pread(reader, 4 * WIDTH, max(0, end - 2 * WIDTH))
    assert len(last) == min(end, 2 * WIDTH), f"{name} {number}: the file ends {len(last)} bytes after {end - 2 * WIDTH}"
    assert all(line.endswith(b";") for line in last.splitlines()), f"{name} {number}: the last records are {last}"
    record = f"{name} {number}".ljust(WIDTH - 2).encode() + b";\n"
    if how == "seek":
        os.write(writer, record)
    else:
        os.pwrite(writer, record, end)
    lock(fcntl.F_UNLCK)
