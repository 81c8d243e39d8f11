package e2e_test

import (
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
)

// playServerRestart replaces the ext_proc server, on the same port, while two requests
// run. Those are evicted, too late if they have lost their server (the first word is
// how many victims there were), and then one that comes later.
func playServerRestart(t *testing.T, bin string) []cell {
	var rows sheet
	for _, r := range []struct {
		name     string
		opens    bool // failure_mode_allow
		graceful bool
		stop     func(*grpc.Server)
	}{
		{"stop/fail-closed", false, false, (*grpc.Server).Stop},
		{"stop/fail-open", true, false, (*grpc.Server).Stop},
		{"graceful-stop", false, true, func(gs *grpc.Server) { go gs.GracefulStop() }}, // ends with the requests
	} {
		s := raise(t, bin, none, func(s *stage) { s.config.ExtProc[0].FailureModeAllow = r.opens })
		p := s.paths[1]
		start := func(b backend, at mark) *call {
			c := sceneCall(p, b)
			c.trailer = true
			s.start(t.Context(), c)
			c.must(t, at)
			return c
		}
		running := []*call{start(comesLate, wrote), start(resumes, hasEnough)}
		s.replaceServer(r.stop)
		if r.graceful {
			if err := s.stat("cluster.ext_proc_0.upstream_cx_close_notify", 1); err != nil {
				t.Fatal(err)
			}
		}
		for i, c := range running {
			rows.row(names(r.name, moments[i].name), func() string {
				if !r.graceful {
					c.await(hungUp)
				}
				victims, err := s.evict(c)
				if err != nil {
					return err.Error()
				}
				if r.opens {
					close(c.resume)
				}
				return words(len(victims), s.end(c))
			})
		}
		next := start(finishes, done)
		rows.row(names(r.name, "next"), func() string { return s.end(next) })
		rows.row(names(r.name, "next-evicted"), func() string { return s.evicted(sceneCall(p, waits), wrote) })
	}
	return rows.all()
}

// playMessageTimeout has the ext_proc server hold a message for longer than
// message_timeout, and evicts then. The first word is how many victims there were.
func playMessageTimeout(t *testing.T, bin string) []cell {
	const timeout = 200 * time.Millisecond
	var rows sheet
	for _, m := range modes {
		s := raise(t, bin, m, func(s *stage) { s.config.ExtProc[0].MessageTimeout = timeout })
		for _, held := range []mark{requestHeaders, responseHeaders} {
			rows.row(names(held, m), func() string {
				c := sceneCall(s.paths[1], begins)
				c.hold = held
				s.start(s.Context(), c)
				if err := c.await(holding); err != nil {
					return err.Error()
				}
				if m == duplex {
					time.Sleep(2 * timeout) // nothing happens
				} else if !eventually(func() bool { return c.handle.Outcome() != abort.Pending }) {
					return "no end"
				}
				victims, err := s.evict(c)
				if err == nil && len(victims) > 0 {
					err = c.await(done)
				}
				if err != nil {
					return err.Error()
				}
				close(c.resume)
				return words(len(victims), s.end(c))
			})
		}
	}
	return rows.all()
}
