//! When podfs repeats a request that failed.
//!
//! 1. While the server cannot be reached, one request of this process at a time tries it, after a pause
//!    ([`outage`](super::outage)). The first answer lets all requests that wait go on. So podfs reaches the server soon after the
//!    end of an outage, however long the outage lasted, and however many objects podfs follows.
//! 2. After an answer that is an error, the pause doubles with each such error in a row. An outage ends the row.
//! 3. For some seconds after a connection was made, these pauses stay short: a server that has just started answers 403
//!    until its Node authorizer knows the node's pods, and 500 or 503 until it is ready. As soon as the server allows one
//!    request of this process, podfs repeats those that the server refused.
//! 4. `Retry-After` is the shortest pause. podfs adds up to half of it, because every podfs of the node may have got the same
//!    answer at the same moment; after the second such answer up to the whole of it, and so on.

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::backoff::JitteredBackoff;
use super::client::ApiClient;
use super::error::{ApiError, ErrorClass};

/// The longest time that a server can make podfs wait.
const LONGEST_REQUESTED: Duration = Duration::from_secs(60);
/// How long a connection is new, and how long it is young, with the longest pause of each.
const NEW: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(400));
const YOUNG: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(2));
/// Requests that may continue at the same moment are spread over this time.
const SPREAD: Duration = Duration::from_millis(50);

/// The failures of one request that podfs repeats.
pub(crate) struct Retry {
    client: ApiClient,
    backoff: JitteredBackoff,
}

/// The end of a pause, after which podfs repeats the request.
#[derive(Debug, PartialEq)]
pub(crate) enum Pause {
    /// The server could not be reached. The pause ends when the server answers some request, or when this request may try.
    Outage,
    /// The pause ends at this moment.
    Until(Instant),
    /// The server refused the request (403). The pause ends at this moment, or when the server allows another request.
    Refused(Instant),
}

impl Retry {
    pub(crate) fn new(client: ApiClient) -> Retry {
        Retry { client, backoff: JitteredBackoff::default() }
    }

    /// Notes that the request succeeded.
    pub(crate) fn reset(&mut self) {
        self.backoff.reset();
    }

    /// Notes that the request failed with this error. Returns the pause.
    pub(crate) fn failed(&mut self, error: &ApiError) -> Pause {
        if error.is_outage() {
            self.backoff.reset();
            return Pause::Outage;
        }
        let longest = match error.class {
            ErrorClass::Forbidden | ErrorClass::Busy => longest_pause(self.client.connected_for()),
            _ => JitteredBackoff::LONGEST,
        };
        let pause = self.backoff.fail_within(longest);
        let requested = error.retry_after.unwrap_or_default().min(LONGEST_REQUESTED);
        let at = Instant::now() + pause.max(requested.mul_f64(stretch(self.backoff.failures())));
        match error.class {
            ErrorClass::Forbidden => Pause::Refused(at),
            _ => Pause::Until(at),
        }
    }

    /// Notes a request that succeeded without a result. Returns the pause.
    pub(crate) fn next_pause(&mut self) -> Pause {
        Pause::Until(Instant::now() + self.backoff.fail())
    }

    /// Waits for the end of a pause. Cancel-safe.
    pub(crate) async fn wait(&self, pause: &Pause) {
        match pause {
            Pause::Outage => {
                tokio::select! {
                    () = self.client.recovered() => spread().await,
                    () = self.client.turn_to_try() => {}
                }
            }
            Pause::Until(at) => sleep_until(*at).await,
            Pause::Refused(at) => {
                tokio::select! {
                    () = sleep_until(*at) => {}
                    () = self.client.allowed() => spread().await,
                }
            }
        }
    }
}

async fn spread() {
    sleep(SPREAD.mul_f64(fastrand::f64())).await;
}

/// The factor on `Retry-After` for a request that has failed so often in a row.
fn stretch(failures: u32) -> f64 {
    1.0 + fastrand::f64() * f64::from(failures.min(8)) / 2.0
}

/// The longest pause after an error, when the server has been reached for so long.
fn longest_pause(connected_for: Duration) -> Duration {
    match connected_for {
        age if age < NEW.0 => NEW.1,
        age if age < YOUNG.0 => YOUNG.1,
        _ => JitteredBackoff::LONGEST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_still_busy_is_left_alone_for_longer() {
        for failures in [1, 2, 8, 100] {
            let most = 1.0 + f64::from(failures.min(8)) / 2.0;
            assert!((0..100).map(|_| stretch(failures)).all(|stretch| (1.0..=most).contains(&stretch)), "{failures}");
        }
    }

    #[test]
    fn a_new_connection_has_short_pauses() {
        let of = |seconds| longest_pause(Duration::from_secs(seconds));
        assert_eq!((of(0), of(9), of(29), of(31)), (NEW.1, NEW.1, YOUNG.1, JitteredBackoff::LONGEST));
    }
}
