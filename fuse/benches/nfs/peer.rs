//! The crate `nfs3_client`. It makes one call at a time on a connection, so each loop has its own connection.

use nfs3_client::nfs3_types::nfs3::{
    CREATE3args, GETATTR3args, LOOKUP3args, READ3args, READDIRPLUS3args, WRITE3args, cookieverf3, createhow3,
    diropargs3, nfs_fh3, sattr3, stable_how,
};
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::tokio::TokioIo;
use nfs3_client::{MountClient, Nfs3Client};
use podfs_nfs::v3::NfsFileHandle;
use tokio::net::TcpStream;

use crate::nfs_rig::Ganesha;
use crate::raw::{MEBIBYTE, Work, scattered_offset};

/// A connection, and the files that it works on.
pub struct Peer {
    client: Nfs3Client<TokioIo<TcpStream>>,
    file: nfs_fh3,
    created: nfs_fh3,
    listed: nfs_fh3,
}

impl Peer {
    pub async fn connect(server: &Ganesha, created: &NfsFileHandle) -> Self {
        let credential = || opaque_auth::auth_unix(&auth_unix::default());
        let stream = TcpStream::connect(server.mount_address()).await.expect("connected");
        let mut mountd = MountClient::new_with_auth(TokioIo::new(stream), credential(), opaque_auth::default());
        let mounted = mountd.mnt(nfs3_client::nfs3_types::mount::dirpath(Opaque::borrowed(b"/export"))).await;
        let root = nfs_fh3 { data: Opaque::owned(mounted.expect("mounted").fhandle.0.to_vec()) };
        let stream = TcpStream::connect(server.address()).await.expect("connected");
        stream.set_nodelay(true).expect("set");
        let mut client = Nfs3Client::new_with_auth(TokioIo::new(stream), credential(), opaque_auth::default());
        let mut found = Vec::new();
        for name in [&b"file"[..], b"listed"] {
            let what = diropargs3 { dir: root.clone(), name: name.into() };
            found.push(client.lookup(&LOOKUP3args { what }).await.expect("an answer").unwrap().object);
        }
        let [file, listed] = found.try_into().expect("two");
        let created = nfs_fh3 { data: Opaque::owned(created.as_bytes().to_vec()) };
        Self { client, file, created, listed }
    }

    pub async fn step(&mut self, work: Work, index: u64, data: &[u8]) {
        let file = self.file.clone();
        match work {
            Work::Read => {
                let args = READ3args { file, offset: index * u64::from(MEBIBYTE), count: MEBIBYTE };
                let read = self.client.read(&args).await.expect("an answer").unwrap();
                assert_eq!(read.data.len(), MEBIBYTE as usize);
            }
            Work::Write => {
                let offset = index * u64::from(MEBIBYTE);
                let (count, stable) = (MEBIBYTE, stable_how::UNSTABLE);
                let args = WRITE3args { file, offset, count, stable, data: Opaque::borrowed(data) };
                self.client.write(&args).await.expect("an answer").unwrap();
            }
            Work::ReadSome => {
                let args = READ3args { file, offset: scattered_offset(index), count: 4096 };
                self.client.read(&args).await.expect("an answer").unwrap();
            }
            Work::Getattr => {
                self.client.getattr(&GETATTR3args { object: file }).await.expect("an answer").unwrap();
            }
            Work::Create => {
                let name = format!("file-{index}").into_bytes();
                let where_ = diropargs3 { dir: self.created.clone(), name: name.into() };
                let args = CREATE3args { where_, how: createhow3::GUARDED(sattr3::default()) };
                self.client.create(&args).await.expect("an answer").unwrap();
            }
            Work::Lookup | Work::LookupAndCreate => unreachable!("only mounts are compared by these"),
            Work::List => self.list().await,
        }
    }

    async fn list(&mut self) {
        let (mut cookie, mut cookieverf) = (0, cookieverf3::default());
        loop {
            let args = READDIRPLUS3args {
                dir: self.listed.clone(),
                cookie,
                cookieverf,
                dircount: 64 << 10,
                maxcount: 64 << 10,
            };
            let page = self.client.readdirplus(&args).await.expect("an answer").unwrap();
            cookieverf = page.cookieverf;
            if let Some(last) = page.reply.entries.0.last() {
                cookie = last.cookie;
            }
            if page.reply.eof {
                break;
            }
        }
    }
}
