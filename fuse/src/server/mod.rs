//! The server: the process that answers FUSE requests for one pod.
//!
//! The supervisor starts it with one end of a socket pair as its standard input. It does what the [`protocol`](crate::protocol)
//! says. It opens nothing by itself: every device and every payload reaches it as a descriptor. What else it could do it gives up
//! when it starts ([`confinement`](crate::confinement)). Each volume is one [`session`](crate::session); the control thread only
//! takes a projection's tree for moments.
//!
//! Either process may die. The supervisor holds what the server holds, as descriptors and as shared memory
//! ([`region`](crate::region)), so another server can go on; the server can give another supervisor all that the first one knew.
//!
//! | module | owns |
//! |---|---|
//! | [`process`] | the server's own loop |
//! | `volumes` | the server's volumes |
//! | [`fd_keeper`] | the process that keeps the server's descriptors when it is killed, and starts the next server |

pub mod fd_keeper;
pub mod process;
mod volumes;
