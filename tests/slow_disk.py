"""A file system that caches appended bytes for 30 s, as a network's client does, and counts its requests (FUSE).

``python slow_disk.py BACKING MOUNTPOINT COUNTS`` passes everything on to a folder, but keeps what is appended to a file
for ``CACHED_S``, until fsync or close: nobody else sees it earlier. It writes the number of requests of each kind to
COUNTS every second. SIGSTOP makes the storage stall. No library is needed: it speaks the kernel's protocol 7.31.
"""

import ctypes
import errno
import json
import os
import stat
import struct
import sys
import threading
import time

CACHED_S = 30.0
HEADER = struct.Struct("<IIQQIIII")  # length, kind, number, node, uid, gid, pid, padding
ANSWER = struct.Struct("<IiQ")
KINDS = {
    1: "lookup",
    3: "getattr",
    4: "setattr",
    8: "mknod",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    13: "link",
    14: "open",
    15: "read",
    16: "write",
    17: "statfs",
    18: "release",
    20: "fsync",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    35: "create",
    45: "rename2",
}
WITHOUT_ANSWER = (2, 36, 42)  # forget, interrupt, batch_forget
ATTRIBUTES_S = 1  # how long the kernel may believe what it was told of a file


class Disk:
    def __init__(self, backing: str, device: int):
        self.device, self.counts, self.lock = device, {}, threading.Lock()
        self.paths = {1: os.path.abspath(backing)}  # by node
        self.nodes, self.last = {self.paths[1]: 1}, 1
        self.cached: dict[str, tuple[float, bytes]] = {}  # of each path: since when, and what was appended

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, 2**20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, kind, number, node, *_ = HEADER.unpack_from(request)
            if kind in WITHOUT_ANSWER:
                continue
            name, data, status = KINDS.get(kind, ""), b"", 0
            self.counts[name or str(kind)] = self.counts.get(name or str(kind), 0) + 1
            try:
                with self.lock:
                    data = getattr(self, name)(node, request[HEADER.size :]) if name else None
                if data is None:
                    data, status = b"", -errno.ENOSYS
            except OSError as error:
                status = -error.errno
            os.write(self.device, ANSWER.pack(ANSWER.size + len(data), status, number) + data)

    # ------------------------------------------------------------------------------------------------- the cache

    def write_back(self, path: str) -> None:
        _, data = self.cached.pop(path, (0, b""))
        if data:
            with open(path, "ab", buffering=0) as file:
                file.write(data)

    def age(self) -> None:
        with self.lock:
            for path in [path for path, (since, _) in self.cached.items() if time.monotonic() - since > CACHED_S]:
                self.write_back(path)

    # --------------------------------------------------------------------------------------------------- requests

    def path(self, node: int, name: bytes = b"") -> str:
        return os.path.join(self.paths[node], os.fsdecode(name)) if name else self.paths[node]

    def node(self, path: str) -> int:
        if path not in self.nodes:
            self.last += 1
            self.nodes[path], self.paths[self.last] = self.last, path
        return self.nodes[path]

    def moved(self, old: str, new: str) -> None:
        """The node of a path, and those of all below it, go with it."""
        for path in [path for path in self.nodes if path == old or path.startswith(old + "/")]:
            node, target = self.nodes.pop(path), new + path[len(old) :]
            self.nodes[target], self.paths[node] = node, target
            if path in self.cached:
                self.cached[target] = self.cached.pop(path)

    def attributes(self, path: str, node: int) -> bytes:
        s = os.lstat(path)
        times = [s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns]
        seconds, rest = [t // 10**9 for t in times], [t % 10**9 for t in times]
        packed = struct.pack("<QQQ3Q3I", node, s.st_size, s.st_blocks, *seconds, *rest)
        return packed + struct.pack("<IIIIIII", s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev, 4096, 0)

    def entry(self, path: str) -> bytes:
        os.lstat(path)
        node = self.node(path)
        return struct.pack("<QQQQII", node, 0, ATTRIBUTES_S, ATTRIBUTES_S, 0, 0) + self.attributes(path, node)

    def init(self, _node, data):
        major, minor, readahead, _flags = struct.unpack_from("<IIII", data)
        return struct.pack("<IIIIHHIIHHI7I", 7, min(31, minor), readahead, 0x28, 12, 10, 2**17, 1, 32, 0, 0, *[0] * 7)

    def lookup(self, node, data):
        return self.entry(self.path(node, data.rstrip(b"\0")))

    def getattr(self, node, _data):
        return struct.pack("<QII", 0, 0, 0) + self.attributes(self.path(node), node)

    def setattr(self, node, data):
        valid, _, _, size, _, atime, mtime, _, a_ns, m_ns, _, mode = struct.unpack_from("<IIQQQQQQIIII", data)
        path = self.path(node)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 8:
            self.write_back(path)
            os.truncate(path, size)
        if valid & 0x20 and not valid & 0x180:
            os.utime(path, ns=(atime * 10**9 + a_ns, mtime * 10**9 + m_ns))
        return self.getattr(node, b"")

    def mkdir(self, node, data):
        mode, _ = struct.unpack_from("<II", data)
        path = self.path(node, data[8:].rstrip(b"\0"))
        os.mkdir(path, mode)
        return self.entry(path)

    def unlink(self, node, data):
        path = self.path(node, data.rstrip(b"\0"))
        os.unlink(path)
        self.cached.pop(path, None)
        self.paths.pop(self.nodes.pop(path, 0), None)
        return b""

    def rmdir(self, node, data):
        os.rmdir(self.path(node, data.rstrip(b"\0")))
        return b""

    def rename(self, node, data, names_at=8):
        (target,) = struct.unpack_from("<Q", data)
        old, new = data[names_at:].split(b"\0")[:2]
        old, new = self.path(node, old), self.path(target, new)
        os.rename(old, new)
        self.moved(old, new)
        return b""

    def rename2(self, node, data):
        return self.rename(node, data, 16)

    def link(self, node, data):
        (source,) = struct.unpack_from("<Q", data)
        path = self.path(node, data[8:].rstrip(b"\0"))
        os.link(self.path(source), path)
        return self.entry(path)

    def open(self, node, data):
        (flags,) = struct.unpack_from("<I", data)
        handle = os.open(self.path(node), flags & ~(os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT | os.O_APPEND))
        return struct.pack("<QII", handle, 1, 0)  # 1: direct, the kernel caches nothing of its own

    def create(self, node, data):
        flags, mode, _, _ = struct.unpack_from("<IIII", data)
        path = self.path(node, data[16:].rstrip(b"\0"))
        handle = os.open(path, (flags | os.O_CREAT) & ~os.O_APPEND, mode)
        return self.entry(path) + struct.pack("<QII", handle, 1, 0)

    def read(self, _node, data):
        handle, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(handle, size, offset)

    def write(self, node, data):
        handle, offset, size, _, _, flags = struct.unpack_from("<QQIIQI", data)
        content = data[40 : 40 + size]
        if flags & os.O_APPEND:
            path = self.path(node)
            since, before = self.cached.get(path, (time.monotonic(), b""))
            self.cached[path] = since, before + content
        else:
            os.pwrite(handle, content, offset)
        return struct.pack("<II", size, 0)

    def statfs(self, _node, _data):
        s = os.statvfs(self.paths[1])
        head = struct.pack("<QQQQQ", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return head + struct.pack("<IIII6I", s.f_bsize, 255, s.f_frsize, 0, *[0] * 6)

    def release(self, _node, data):
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def fsync(self, node, _data):
        if node in self.paths:
            self.write_back(self.paths[node])
        return b""

    flush = fsync

    def opendir(self, _node, _data):
        return struct.pack("<QII", 0, 0, 0)

    def releasedir(self, _node, _data):
        return b""

    def readdir(self, node, data):
        _, offset, size = struct.unpack_from("<QQI", data)
        entries = b""
        for number, name in enumerate(sorted(os.listdir(self.path(node))), start=1):
            if number <= offset:
                continue
            raw = os.fsencode(name)
            is_dir = os.path.isdir(self.path(node, raw))
            entry = struct.pack("<QQII", number + 100, number, len(raw), 4 if is_dir else 8) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries


def main(backing: str, mountpoint: str, counts: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow_disk", mountpoint.encode(), b"fuse.slow_disk", 0, options.encode()):
        sys.exit(f"cannot be mounted: {os.strerror(ctypes.get_errno())}")
    disk = Disk(backing, device)

    def tell() -> None:
        while True:
            with open(counts + ".new", "w") as file:
                json.dump(disk.counts, file)
            os.replace(counts + ".new", counts)
            disk.age()
            time.sleep(1)

    threading.Thread(target=tell, daemon=True).start()
    disk.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
