package extproctest_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/extevict/extevict/extproc/extproctest"
)

func details(s string) *response {
	return &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{Details: s}}}
}

func requestBody(s string) *request {
	return &request{Request: &extprocpb.ProcessingRequest_RequestBody{RequestBody: &extprocpb.HttpBody{Body: []byte(s)}}}
}

// TestStreamEnds: what Recv and Send return after each way a stream can end, and that Recv goes on returning it.
func TestStreamEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end        func(s *extproctest.Stream, parent context.CancelFunc)
		recv, send string
		alive      bool
	}{
		"hang up":         {func(s *extproctest.Stream, _ context.CancelFunc) { s.HangUp() }, "Canceled: context canceled", "Canceled: context canceled", false},
		"half-close":      {func(s *extproctest.Stream, _ context.CancelFunc) { s.HalfClose() }, "EOF", "OK: ", true},
		"lost connection": {func(_ *extproctest.Stream, parent context.CancelFunc) { parent() }, "Canceled: context canceled", "Canceled: context canceled", false},
		"deadline":        {func(*extproctest.Stream, context.CancelFunc) { time.Sleep(time.Hour) }, "DeadlineExceeded: context deadline exceeded", "DeadlineExceeded: context deadline exceeded", false},
	} {
		for _, blocked := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					parent, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					s := extproctest.NewStream(parent, 1)
					recv := func() string { _, err := s.Recv(); return text(err) }
					got := make(chan string, 1)
					if blocked {
						go func() { got <- recv() }()
						synctest.Wait()
						tt.end(s, cancel)
					} else {
						tt.end(s, cancel)
						got <- recv()
					}
					if diff := cmp.Diff(tt.recv, <-got); diff != "" {
						t.Errorf("Recv (-want +got):\n%s", diff)
					}
					if diff := cmp.Diff(tt.send, text(s.Send(details("x")))); diff != "" {
						t.Errorf("Send (-want +got):\n%s", diff)
					}
					if alive := s.Context().Err() == nil; alive != tt.alive {
						t.Errorf("context alive %v", alive)
					}
					if s.Push(requestBody("x")) {
						t.Error("Push after the end")
					}
					s.HangUp()
					if diff := cmp.Diff(tt.recv, recv()); diff != "" {
						t.Errorf("second Recv (-want +got):\n%s", diff)
					}
				})
			})
		}
	}
}

func text(err error) string {
	if err == io.EOF {
		return "EOF"
	}
	return status.Code(err).String() + ": " + strings.ReplaceAll(status.Convert(err).Message(), "\u00a0", " ") // protobuf's whim
}

func TestStreamMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := extproctest.NewStream(t.Context(), 1)
		pushed := make(chan bool)
		push := func(r *request) { pushed <- s.Push(r) }

		go push(requestBody("a"))
		synctest.Wait()
		select {
		case <-pushed:
			t.Error("Push returned before Recv")
		default:
		}
		got, err := s.Recv()
		if diff := cmp.Diff(requestBody("a"), got, protocmp.Transform()); diff != "" || err != nil || !<-pushed {
			t.Errorf("Recv: %v (-want +got):\n%s", err, diff)
		}

		go push(requestBody("b"))
		into := &request{ObservabilityMode: true}
		err = s.RecvMsg(into)
		if diff := cmp.Diff(requestBody("b"), into, protocmp.Transform()); diff != "" || err != nil || !<-pushed {
			t.Errorf("RecvMsg: %v (-want +got):\n%s", err, diff)
		}

		mine := details("1")
		if err := s.Send(mine); err != nil {
			t.Fatal(err)
		}
		mine.GetImmediateResponse().Details = "changed after Send"
		second := make(chan error)
		go func() { second <- s.SendMsg(details("2")) }()
		synctest.Wait()
		select {
		case <-second:
			t.Error("Send did not wait for the window")
		default:
		}
		for _, want := range []string{"1", "2"} {
			if diff := cmp.Diff(details(want), <-s.Replies(), protocmp.Transform()); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
		}
		if err := <-second; err != nil {
			t.Error(err)
		}

		// Blocked on a full window, Send ends with the stream; what was sent stays readable.
		s.Send(details("3"))
		go func() { second <- s.Send(details("4")) }()
		synctest.Wait()
		s.HangUp()
		if err := <-second; status.Code(err) != codes.Canceled {
			t.Errorf("Send: %v", err)
		}
		if len(s.Replies()) != 1 {
			t.Errorf("%d replies left, want 1", len(s.Replies()))
		}
	})
}

func TestStreamIsStrict(t *testing.T) {
	for name, tt := range map[string]struct{ first, second func(*extproctest.Stream) }{
		"concurrent Recv": {
			func(s *extproctest.Stream) { s.Recv() },
			func(s *extproctest.Stream) { s.RecvMsg(new(request)) },
		},
		"concurrent Send": {
			func(s *extproctest.Stream) { s.Send(details("x")) },
			func(s *extproctest.Stream) { s.SendMsg(details("y")) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := extproctest.NewStream(t.Context(), 0)
				go tt.first(s)
				synctest.Wait()
				defer s.HangUp()
				defer func() {
					if diff := cmp.Diff(any("extproctest: "+name), recover()); diff != "" {
						t.Errorf("panic (-want +got):\n%s", diff)
					}
				}()
				tt.second(s)
			})
		})
	}
	t.Run("one of each", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := extproctest.NewStream(t.Context(), 0)
			go s.Recv()
			go s.Send(details("x"))
			synctest.Wait()
			s.HangUp()
		})
	})
}

func TestStreamServe(t *testing.T) {
	for name, tt := range map[string]struct {
		serve serverFunc
		want  string
		panic any
	}{
		"returns":                {func(stream) error { return status.Error(codes.NotFound, "x") }, "NotFound: x", nil},
		"panics":                 {func(stream) error { panic("boom") }, "OK: ", "boom"},
		"sends what is no UTF-8": {func(st stream) error { return ignore(st.Send(details("\xff"))) }, "Internal: grpc: error while marshaling: string field contains invalid UTF-8", nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := extproctest.NewStream(t.Context(), 1)
			var err error
			got := func() (p any) {
				defer func() { p = recover() }()
				err = s.Serve(tt.serve)
				return nil
			}()
			if diff := cmp.Diff(tt.panic, got); diff != "" {
				t.Errorf("panic (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.want, text(err)); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if s.Context().Err() == nil {
				t.Error("the context lives on")
			}
			if len(s.Replies()) != 0 {
				t.Errorf("sent %v", <-s.Replies())
			}
		})
	}
}

func ignore(error) error { return nil }

// TestStreamPause: time passes on both sides of the point where a message passes.
func TestStreamPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := extproctest.NewStream(t.Context(), 1)
		s.Pause = func() { time.Sleep(time.Second) }
		start := time.Now()
		at := make(chan time.Duration, 2)
		go func() { s.Recv(); at <- time.Since(start) }()
		s.Push(requestBody("x"))
		if passed := time.Since(start); passed != time.Second {
			t.Errorf("received after %v, want 1s", passed)
		}
		if d := <-at; d != 2*time.Second {
			t.Errorf("Recv returned after %v, want 2s", d)
		}
		go func() { s.Send(details("x")); at <- time.Since(start) }()
		<-s.Replies()
		if passed := time.Since(start); passed != 3*time.Second {
			t.Errorf("sent after %v, want 3s", passed)
		}
		if d := <-at; d != 4*time.Second {
			t.Errorf("Send returned after %v, want 4s", d)
		}
	})
}
