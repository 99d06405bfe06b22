//! The server: the process that answers FUSE requests for one pod.
//!
//! The supervisor starts it with one end of a socket pair as its standard input, on which both speak the
//! [`protocol`](crate::protocol). The server opens nothing by itself: it gets every device and every payload as a descriptor. It
//! gives up all other rights when it starts ([`confinement`](crate::confinement)). Each volume is one [`session`](crate::session);
//! the control thread locks a projection's tree only for moments.
//!
//! Either process may die. The supervisor holds the server's state, as descriptors and as shared memory
//! ([`region`](crate::region)), so another server can continue. The server can give another supervisor the state of the first one.
//!
//! | module | owns |
//! |---|---|
//! | [`process`] | the server's own loop |
//! | `volumes` | the server's volumes |
//! | [`fd_keeper`] | the process that keeps the server's descriptors when it is killed, and starts the next server |

pub mod fd_keeper;
pub mod process;
mod volumes;
