//! Calls that are not answered in time: the client sends a call again after `timeo`. After `retrans` repetitions, it gives the
//! call up or logs that the server does not answer. It repeats a call sooner if it has sent the call on an earlier connection.
//!
//! All calls share one timer, which expires when the first of them is due, so that most calls cost no timer.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use tokio::time::{Sleep, sleep_until};

use super::failure::RpcError;
use super::pending::{PendingCall, SharedConnection};
use super::policy::Persistence;

/// Watches the calls of a connection for as long as it exists.
pub(super) async fn watch(shared: Rc<SharedConnection>) {
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    loop {
        let next = handle_due_calls(&shared);
        shared.next_check.set(next);
        match (next, &mut timer) {
            (None, timer) => *timer = None,
            (Some(next), Some(timer)) => timer.as_mut().reset(next.into()),
            (Some(next), timer) => *timer = Some(Box::pin(sleep_until(next.into()))),
        }
        let mut woken = false;
        poll_fn(|context| {
            // The first poll registers the waker; the second one comes after a wake-up.
            if std::mem::replace(&mut woken, true) {
                return Poll::Ready(());
            }
            shared.deadlines.wait(context);
            timer.as_mut().map_or(Poll::Pending, |timer| timer.as_mut().poll(context))
        })
        .await;
    }
}

/// Handles the calls that are due. Returns the time at which the next call is due.
fn handle_due_calls(shared: &SharedConnection) -> Option<Instant> {
    let now = Instant::now();
    let due: Vec<Rc<PendingCall>> =
        shared.pending.borrow().values().filter(|call| call.next() <= now).cloned().collect();
    for call in &due {
        if call.due.get() <= now {
            handle_timeout(shared, call, now);
        } else if let Some((_, pause)) = call.reminder.get() {
            call.reminder.set((pause < call.policy.timeo).then_some((now + pause, 2 * pause)));
            shared.send_again(call);
        }
    }
    shared.pending.borrow().values().map(|call| call.next()).min()
}

/// Handles a call of which another `timeo` has passed.
fn handle_timeout(shared: &SharedConnection, call: &Rc<PendingCall>, now: Instant) {
    let periods = call.periods.get().saturating_add(1);
    call.periods.set(periods);
    call.due.set(now + call.policy.timeo);
    call.reminder.set(None);
    let is_over = periods > call.policy.retrans;
    match call.policy.persistence {
        Persistence::Soft if is_over => shared.give_up(call, RpcError::NoAnswer),
        Persistence::SoftErr if is_over => shared.give_up(call, RpcError::NoAnswerInTime),
        Persistence::Hard | Persistence::Soft | Persistence::SoftErr => shared.send_again(call),
    }
    if is_over && !call.policy.quiet {
        shared.peer.log_silence(call.policy.persistence == Persistence::Hard);
    }
}
