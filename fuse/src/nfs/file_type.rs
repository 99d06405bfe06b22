//! Types of files: those of the NFS protocol, and `S_IFMT` of `st_mode`.

use podfs_nfs::v3::FileType;

/// The type of a file, as `S_IFMT` of its mode.
pub fn file_type(kind: FileType) -> u32 {
    match kind {
        FileType::File => libc::S_IFREG,
        FileType::Directory => libc::S_IFDIR,
        FileType::Block => libc::S_IFBLK,
        FileType::Character => libc::S_IFCHR,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Socket => libc::S_IFSOCK,
        FileType::Pipe => libc::S_IFIFO,
    }
}

/// The type of a file with this `S_IFMT`.
pub fn kind_of(file_type: u32) -> Option<FileType> {
    Some(match file_type {
        libc::S_IFREG => FileType::File,
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFBLK => FileType::Block,
        libc::S_IFCHR => FileType::Character,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFIFO => FileType::Pipe,
        _ => return None,
    })
}
