"""System calls in two directories at once, to compare what they return.

As a process of the differential tester (`actor.py serve UID DIRECTORIES`), it makes the calls that come in as lines of JSON, and answers each with a
line. As a script that the tester printed, it makes the calls of PROGRAM in turn in a native directory and in a volume, and prints how the
answers differ.

A call is [ACTOR, NAME, ARGUMENTS...]. A, U and V are processes that use the volume (U is an ordinary user), B uses a second volume of the
same directory, H is on the host. A number in the first place of the arguments is the slot of an open file.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
LONG = ctypes.c_long
SYS_RENAMEAT2, SYS_GETDENTS64, SYS_FALLOCATE, SYS_PROCESS_VM_READV, SYS_PROCESS_VM_WRITEV = 316, 217, 285, 310, 311
SYS_NAME_TO_HANDLE_AT, SYS_OPEN_BY_HANDLE_AT, SYS_FACCESSAT2 = 303, 304, 439
AT_FDCWD, AT_EMPTY_PATH, AT_SYMLINK_FOLLOW, AT_EACCESS = -100, 0x1000, 0x400, 0x200
WORDS = {
    name: getattr(module, name)
    for module in (os, fcntl, mmap)
    for name in dir(module)
    if name.split("_")[0] in ("O", "LOCK", "MAP", "PROT", "SEEK", "XATTR", "RWF")
}
WORDS.update({"RENAME_NOREPLACE": 1, "RENAME_EXCHANGE": 2, "RENAME_WHITEOUT": 4})
WORDS.update({"KEEP_SIZE": 1, "PUNCH_HOLE": 2, "COLLAPSE_RANGE": 8, "ZERO_RANGE": 16, "INSERT_RANGE": 32, "UNSHARE_RANGE": 64})
WORDS.update({"S_IFIFO": stat.S_IFIFO, "S_IFSOCK": stat.S_IFSOCK, "S_IFCHR": stat.S_IFCHR, "S_IFREG": stat.S_IFREG})
# The requests BTRFS_IOC_SUBVOL_CREATE and BTRFS_IOC_SNAP_CREATE_V2.
SUBVOLUME_CREATE, SNAPSHOT_CREATE = 0x5000940E, 0x50009417
LOCKS = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}
LOCK = "hhxxxxqqixxxx"
OFD_GETLK, OFD_SETLK = 36, 37
# A time that is not as old as this is that of a call of the program.
RECENT = 86_400

files, streams, maps, handles = {}, {}, {}, {}


class NoSuchSlot(Exception):
    pass


def bits(words):
    """The number that these names mean, joined by `|`."""
    return sum({WORDS[word] for word in words.split("|") if word}) if isinstance(words, str) else words


def check(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(*arguments):
    return check(libc.syscall(*[LONG(argument) if isinstance(argument, int) else argument for argument in arguments]))


def file(slot):
    if slot not in files:
        raise NoSuchSlot
    return files[slot]


def show(data):
    """Bytes in few characters, such that others look different."""
    if len(data) <= 40:
        return data.decode("latin-1")
    return f"{len(data)} bytes {hashlib.sha1(data).hexdigest()[:12]}, {len(data.rstrip(bytes(1)))} without zeros at the end"


def pattern(seed, length):
    unit = f"{seed:03d}.".encode()
    return (unit * (length // 4 + 1))[:length]


def buffer(length):
    """Memory for data, as O_DIRECT wants it."""
    return mmap.mmap(-1, max(length, 1))


def when(seconds, nanoseconds):
    return "now" if abs(time.time() - seconds) < RECENT else f"{seconds}.{nanoseconds:09d}"


def describe(status):
    kind = stat.S_IFMT(status.st_mode)
    shown = {"mode": oct(status.st_mode), "uid": status.st_uid, "gid": status.st_gid, "nlink": status.st_nlink}
    shown["size"] = status.st_size
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        shown["rdev"] = status.st_rdev
    for name in ("atime", "mtime", "ctime"):
        total = getattr(status, f"st_{name}_ns")
        shown[name] = when(total // 10**9, total % 10**9)
    return shown


def put(slot, descriptor):
    close(slot)
    files[slot] = descriptor
    return "opened"


def close(slot):
    streams.pop(slot, None)
    if slot in files:
        os.close(files.pop(slot))


def c_open(slot, path, flags, mode=0o644):
    return put(slot, os.open(path, bits(flags) | os.O_NONBLOCK, mode))


def c_openat(slot, directory, path, flags, mode=0o644):
    return put(slot, os.open(path, bits(flags) | os.O_NONBLOCK, mode, dir_fd=file(directory)))


def c_reopen(slot, other, flags):
    return put(slot, os.open(f"/proc/self/fd/{file(other)}", bits(flags) | os.O_NONBLOCK))


def c_dup(slot, other):
    return put(slot, os.dup(file(other)))


def c_close(slot):
    file(slot)
    close(slot)


def c_pread(slot, length, offset):
    data = buffer(length)
    return show(data[: os.preadv(file(slot), [data], offset)])


def c_read(slot, length):
    data = buffer(length)
    return show(data[: os.readv(file(slot), [data])])


def c_pwrite(slot, seed, length, offset, flags=0):
    data = buffer(length)
    data[:length] = pattern(seed, length)
    return os.pwritev(file(slot), [memoryview(data)[:length]], offset, bits(flags))


def c_write(slot, seed, length):
    data = buffer(length)
    data[:length] = pattern(seed, length)
    return os.writev(file(slot), [memoryview(data)[:length]])


def c_lseek(slot, offset, whence):
    result = os.lseek(file(slot), offset, bits(whence))
    if stat.S_ISDIR(os.fstat(file(slot)).st_mode):
        # Where a directory ends, and which offsets it has, differs between file systems.
        os.lseek(file(slot), 0, os.SEEK_SET)
        return "a directory"
    return result


def c_fallocate(slot, mode, offset, length):
    syscall(SYS_FALLOCATE, file(slot), bits(mode), offset, length)


def c_copy(source, target, length, source_offset, target_offset):
    return os.copy_file_range(file(source), file(target), length, source_offset, target_offset)


def c_sendfile(target, source, offset, length):
    return os.sendfile(file(target), file(source), offset, length)


def c_setfl(slot, flags):
    fcntl.fcntl(file(slot), fcntl.F_SETFL, bits(flags) | os.O_NONBLOCK)


def c_getfl(slot):
    return fcntl.fcntl(file(slot), fcntl.F_GETFL)


def c_fstat(slot):
    return describe(os.fstat(file(slot)))


def c_same(slot, path):
    return os.path.samestat(os.fstat(file(slot)), os.lstat(path))


def c_times(path, accessed, modified, follow=1):
    os.utime(path, ns=(accessed, modified), follow_symlinks=bool(follow))


def c_futimens(slot, accessed, modified):
    os.utime(file(slot), ns=(accessed, modified))


def c_access(path, mode):
    syscall(SYS_FACCESSAT2, AT_FDCWD, path.encode(), mode, AT_EACCESS)


def c_link(path, new):
    os.link(path, new, follow_symlinks=False)


def c_linkfd(slot, new):
    # os.link has no AT_SYMLINK_FOLLOW in Linux.
    check(libc.linkat(AT_FDCWD, f"/proc/self/fd/{file(slot)}".encode(), AT_FDCWD, new.encode(), AT_SYMLINK_FOLLOW))


def c_rename(path, new, flags=0):
    syscall(SYS_RENAMEAT2, AT_FDCWD, path.encode(), AT_FDCWD, new.encode(), bits(flags))


def c_mknod(path, kind, mode):
    os.mknod(path, bits(kind) | mode, 0)


def c_subvolume(path):
    """Makes a subvolume of btrfs."""
    parent, name = opened_parent(path)
    try:
        fcntl.ioctl(parent, SUBVOLUME_CREATE, bytearray(struct.pack("q4088s", 0, name)))
    finally:
        os.close(parent)


def c_snapshot(path, new):
    """Makes a snapshot of a subvolume."""
    source = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        parent, name = opened_parent(new)
        try:
            fcntl.ioctl(parent, SNAPSHOT_CREATE, bytearray(struct.pack("q48x4040s", source, name)))
        finally:
            os.close(parent)
    finally:
        os.close(source)


def opened_parent(path):
    parent, name = os.path.split(path)
    return os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY), name.encode()


def c_list(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return sorted(entries(descriptor, None))
    finally:
        os.close(descriptor)


def entries(descriptor, count):
    """The next entries of a directory: names and types. Leaves the position behind the last one."""
    found = []
    memory = ctypes.create_string_buffer(4096)
    while count is None or len(found) < count:
        length = syscall(SYS_GETDENTS64, descriptor, memory, 4096)
        if length == 0:
            break
        at = 0
        while at < length:
            _, offset, size, kind = struct.unpack_from("QqHB", memory, at)
            name = memory.raw[at + 19 : at + size].split(b"\0")[0].decode()
            if name not in (".", ".."):
                found.append([name, kind])
            at += size
            if count is not None and len(found) == count:
                os.lseek(descriptor, offset, os.SEEK_SET)
                break
    return found


def c_readdir(slot, count):
    return entries(file(slot), count)


def c_tell(slot, number):
    streams.setdefault(slot, {})[number] = os.lseek(file(slot), 0, os.SEEK_CUR)


def c_seekdir(slot, number):
    if number not in streams.get(slot, {}):
        raise NoSuchSlot
    os.lseek(file(slot), streams[slot][number], os.SEEK_SET)


def c_rewind(slot):
    os.lseek(file(slot), 0, os.SEEK_SET)


def c_setxattr(path, name, value, flags=0):
    os.setxattr(path, name, value.encode("latin-1"), bits(flags), follow_symlinks=False)


def c_fsetxattr(slot, name, value, flags=0):
    os.setxattr(file(slot), name, value.encode("latin-1"), bits(flags))


def c_getxattr(path, name):
    return show(os.getxattr(path, name, follow_symlinks=False))


def c_fgetxattr(slot, name):
    return show(os.getxattr(file(slot), name))


def c_listxattr(path):
    return sorted(os.listxattr(path, follow_symlinks=False))


def c_removexattr(path, name):
    os.removexattr(path, name, follow_symlinks=False)


def c_setacl(path, kind, entries):
    """Sets an ACL of [tag, permissions, id] entries."""
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, mode, who) for tag, mode, who in entries)
    os.setxattr(path, f"system.posix_acl_{kind}", value)


def c_mmap(number, slot, protection, flags, offset, length):
    descriptor = file(slot)
    c_munmap(number, False)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [LONG]
    address = libc.mmap(None, length, bits(protection), bits(flags), descriptor, offset)
    if address == ctypes.c_void_p(-1).value:
        check(-1)
    maps[number] = (address, length)


def c_munmap(number, must=True):
    if number in maps:
        address, length = maps.pop(number)
        check(libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length)))
    elif must:
        raise NoSuchSlot


def place(number, offset, length):
    if number not in maps:
        raise NoSuchSlot
    address, mapped = maps[number]
    offset = min(offset, mapped - 1)
    return address + offset, min(length, mapped - offset)


def transfer(call, data, address):
    # The kernel copies, so a page behind the end of the file is an error here, and no signal.
    local = struct.pack("QQ", ctypes.addressof(data), len(data))
    remote = struct.pack("QQ", address, len(data))
    return syscall(call, os.getpid(), local, 1, remote, 1, 0)


def c_load(number, offset, length):
    address, length = place(number, offset, length)
    data = (ctypes.c_char * length)()
    return show(data.raw[: transfer(SYS_PROCESS_VM_READV, data, address)])


def c_store(number, seed, offset, length):
    address, length = place(number, offset, length)
    data = (ctypes.c_char * length).from_buffer_copy(pattern(seed, length))
    return transfer(SYS_PROCESS_VM_WRITEV, data, address)


def c_msync(number):
    address, length = place(number, 0, 1 << 40)
    check(libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(length), 4))


def c_flock(slot, how):
    fcntl.flock(file(slot), bits(how) | fcntl.LOCK_NB)


def set_lock(slot, command, kind, start, length):
    fcntl.fcntl(file(slot), command, struct.pack(LOCK, LOCKS[kind], 0, start, length, 0))


def get_lock(slot, command, kind, start, length):
    answer = fcntl.fcntl(file(slot), command, struct.pack(LOCK, LOCKS[kind], 0, start, length, 0))
    kind, _, start, length, _ = struct.unpack(LOCK, answer)
    return [next(word for word, number in LOCKS.items() if number == kind), start, length]


def c_posix(slot, kind, start, length):
    set_lock(slot, fcntl.F_SETLK, kind, start, length)


def c_ofd(slot, kind, start, length):
    set_lock(slot, OFD_SETLK, kind, start, length)


def c_posixget(slot, kind, start, length):
    return get_lock(slot, fcntl.F_GETLK, kind, start, length)


def c_ofdget(slot, kind, start, length):
    return get_lock(slot, OFD_GETLK, kind, start, length)


def c_handle(number, path):
    handle = struct.pack("Ii", 128, 0) + bytes(128)
    handle = ctypes.create_string_buffer(handle, len(handle))
    mount = ctypes.c_int()
    syscall(SYS_NAME_TO_HANDLE_AT, AT_FDCWD, path.encode(), handle, ctypes.byref(mount), 0)
    handles[number] = handle


def c_openhandle(slot, number, flags):
    if number not in handles:
        raise NoSuchSlot
    base = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return put(slot, syscall(SYS_OPEN_BY_HANDLE_AT, base, handles[number], bits(flags) | os.O_NONBLOCK))
    finally:
        os.close(base)


def c_chdir(path):
    try:
        os.chdir(path)
    except PermissionError:
        # The modes of the directories above those of the programs differ.
        if is_inside(os.path.normpath(os.path.join(os.getcwd(), path))):
            raise
        return go_back()
    return stay_inside()


def c_fchdir(slot):
    os.fchdir(file(slot))
    return stay_inside()


def stay_inside():
    """Returns to the directory of the program from the directories of other programs."""
    try:
        inside = is_inside(os.getcwd())
    except FileNotFoundError:
        return "in a removed directory"
    return "inside" if inside else go_back()


def is_inside(path):
    return path.startswith(f"{base_path}/{home}")


def go_back():
    os.fchdir(base_descriptor)
    os.chdir(f"{home}/1/2/3/4")
    return "outside"


def c_getcwd():
    path = os.getcwd()
    assert path.startswith(base_path)
    return path[len(base_path) :]


CALLS = {name[2:]: function for name, function in globals().items() if name.startswith("c_")}
CALLS.update(
    {
        "ftruncate": lambda slot, length: os.ftruncate(file(slot), length),
        "truncate": os.truncate,
        "fsync": lambda slot: os.fsync(file(slot)),
        "fdatasync": lambda slot: os.fdatasync(file(slot)),
        "stat": lambda path: describe(os.stat(path)),
        "lstat": lambda path: describe(os.lstat(path)),
        "chmod": os.chmod,
        "fchmod": lambda slot, mode: os.fchmod(file(slot), mode),
        "chown": os.chown,
        "lchown": os.lchown,
        "fchown": lambda slot, uid, gid: os.fchown(file(slot), uid, gid),
        "symlink": os.symlink,
        "readlink": os.readlink,
        "unlink": os.unlink,
        "rmdir": os.rmdir,
        "mkdir": os.mkdir,
        "umask": lambda mask: os.umask(mask) and None,
    }
)


def leave():
    failure = None
    for slot in list(files):
        try:
            close(slot)
        except OSError as error:
            failure = error
    for number in list(maps):
        c_munmap(number)
    handles.clear()
    os.chdir("/")
    if failure:
        raise failure


def make(base, path):
    """Makes the directory of a program, open to all."""
    os.umask(0)
    os.fchdir(base)
    os.makedirs(path, 0o777)


def remove(base, path):
    """Removes a directory with everything in it."""
    os.fchdir(base)
    shutil.rmtree(path)


def enter(base, path):
    global home, base_descriptor
    leave()
    home, base_descriptor = path.split("/")[0], base
    os.umask(0o022)
    os.fchdir(base)
    os.chdir(path)


def tree(path, known):
    """Everything below a directory. `known` has the first path of each file, by device and inode number."""
    shown = {}
    for name, kind in sorted(entries_of(path)):
        at = os.path.join(path, name)
        status = os.lstat(at)
        description = describe(status)
        description["first path"] = known.setdefault((status.st_dev, status.st_ino), at)
        answer = [description, kind == stat.S_IFMT(status.st_mode) >> 12]
        if stat.S_ISLNK(status.st_mode):
            answer.append(os.readlink(at))
        elif stat.S_ISREG(status.st_mode):
            descriptor = os.open(at, os.O_RDONLY | os.O_NOATIME)
            answer.append(show(os.read(descriptor, 1 << 26)))
            os.close(descriptor)
        answer.append([[key, show(os.getxattr(at, key, follow_symlinks=False))] for key in sorted(os.listxattr(at, follow_symlinks=False))])
        shown[at] = answer
        if stat.S_ISDIR(status.st_mode):
            shown.update(tree(at, known))
    return shown


def entries_of(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return entries(descriptor, None)
    finally:
        os.close(descriptor)


def answer(base, name, arguments):
    try:
        if name == "enter":
            return ["ok", enter(base, *arguments)]
        if name == "leave":
            return ["ok", leave()]
        if name == "make":
            return ["ok", make(base, *arguments)]
        if name == "remove":
            return ["ok", remove(base, *arguments)]
        if name == "tree":
            return ["ok", tree(".", {})]
        return ["ok", CALLS[name](*arguments)]
    except NoSuchSlot:
        return ["no slot"]
    except OSError as error:
        return ["error", errno.errorcode.get(error.errno, error.errno)]


def serve(directories, uid, requests, answers):
    """Makes calls in the first directory, or after a request `choose` in another one."""
    global base_path
    bases = [(os.open(path, os.O_PATH | os.O_DIRECTORY), os.path.realpath(path)) for path in directories]
    base, base_path = bases[0]
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for line in iter(requests.readline, ""):
        name, *arguments = json.loads(line)
        if name == "choose":
            base, base_path = bases[arguments[0]]
            arguments, name = [], "leave"
        answers.write(json.dumps(answer(base, name, arguments)) + "\n")
        answers.flush()


class ActorProcess:
    """A process that makes calls in a directory."""

    def __init__(self, actor, base):
        requests, answers = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(requests[1])
            os.close(answers[0])
            serve([base], 1000 if actor == "U" else 0, os.fdopen(requests[0]), os.fdopen(answers[1], "w"))
            os._exit(0)
        os.close(requests[0])
        os.close(answers[1])
        self.requests, self.answers = os.fdopen(requests[1], "w"), os.fdopen(answers[0])

    def does(self, *request):
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return json.loads(self.answers.readline() or '["the process has died"]')


def disturb(words):
    if words == "drop caches":
        with open("/proc/sys/vm/drop_caches", "w") as caches:
            caches.write("2")
    else:
        input(f"Now: {words}. Then press Enter. ")


def play(program, native, volume, source=None, second=None):
    """Makes the calls of a program in both places, and prints the answers, with a mark where they differ."""
    places = {"B": second, "H": source}
    directory, last, differences = f"program-{os.getpid()}", None, 0
    actors = {}
    for name in ["A", *sorted({step[0] for step in program} - {"-", "A"})]:
        place = places.get(name, volume)
        if place is None:
            sys.exit(f"actor {name} needs a directory, too")
        actors[name] = [ActorProcess(name, native), ActorProcess(name, place)]
        if name == "A":
            for process in actors["A"]:
                process.does("make", f"{directory}/1/2/3/4")
        for process in actors[name]:
            process.does("enter", f"{directory}/1/2/3/4")
    program = program + [["A", "tree"]] + [["H", "tree"]] * ("H" in actors)
    for by, name, *arguments in program:
        if by == "-":
            disturb(name)
            continue
        if last not in (None, by) and name not in ("flock", "posix", "ofd"):
            # The kernel may show what was before another actor's change for a second.
            time.sleep(1.1)
        last = by
        there, here = [process.does(name, *arguments) for process in actors[by]]
        same = there == here
        differences += not same
        if name != "tree":
            print(" " if same else "!", [by, name, *arguments], there, "" if same else here)
        elif not same:
            print("! the files that remain:", there, here, sep="\n")
    for process in actors["A"]:
        process.does("remove", directory)
    print(f"{differences} answers differ")


# The calls of a printed script.
PROGRAM = []

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[3:], int(sys.argv[2]), sys.stdin, sys.stdout)
    elif len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} NATIVE_DIRECTORY VOLUME [SOURCE [SECOND_VOLUME]]")
    else:
        play(PROGRAM, *sys.argv[1:])
