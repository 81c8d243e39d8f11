package e2e_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// playGRPC evicts server-streaming gRPC calls before they have headers and behind three
// messages.
func playGRPC(t *testing.T, bin string) []cell {
	var rows sheet
	for _, m := range []mode{none, streamed, duplex} {
		s := raise(t, bin, m, func(s *stage) {
			s.config.Upstream.HTTP2 = true
			s.backend = grpc.NewServer(grpc.UnknownServiceHandler(s.serveGRPC))
		})
		conn, err := grpc.NewClient(strings.TrimPrefix(s.envoy.URL(), "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		for _, ph := range moments {
			rows.row(names(ph.name, m), func() string {
				c := sceneCall(s.paths[1], ph.backend)
				s.expect(c)
				go c.doGRPC(s.Context(), conn) // ends with the response
				if err := s.evictAt(c, ph.at); err != nil {
					return err.Error()
				}
				return s.endFor(c, (*call).clientGRPC)
			})
		}
	}
	return rows.all()
}

// doGRPC is the client.
func (c *call) doGRPC(ctx context.Context, conn *grpc.ClientConn) {
	defer c.set(done)
	r := &c.reply
	st, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, c.uri)
	if err == nil {
		err = st.SendMsg(wrapperspb.String("prompt"))
	}
	if err == nil {
		err = st.CloseSend()
	}
	for err == nil {
		token := new(wrapperspb.StringValue)
		if err = st.RecvMsg(token); err == nil {
			r.body += token.Value
		}
		if len(r.body) >= c.enough {
			c.set(hasEnough)
		}
	}
	if st != nil {
		r.trailer = http.Header{}
		for k, v := range st.Trailer() {
			r.trailer[http.CanonicalHeaderKey(k)] = v
		}
	}
	r.err = err
}

// clientGRPC says in words what the client got: messages, status code, whether the
// status message and trailers are the answer's.
func (c *call) clientGRPC() string {
	got := strings.Count(c.reply.body, "\n\n")
	st := status.Convert(c.reply.err)
	message := st.Message()
	if message == errorObject {
		message = "error-object"
	} else if _, code, ok := strings.Cut(message, "RST_STREAM with error code: "); ok {
		message = "RST_STREAM_" + code
	}
	h := c.reply.trailer
	return words(got, "messages", st.Code(), message, h.Get("X-Evicted-Reason"), h.Get("Retry-After"))
}

// serveGRPC is the backend: it sends what a call's backend writes, a message for each
// piece.
func (s *stage) serveGRPC(_ any, ss grpc.ServerStream) error {
	if err := ss.RecvMsg(new(wrapperspb.StringValue)); err != nil {
		return err
	}
	uri, _ := grpc.MethodFromServerStream(ss)
	c := s.find(uri)
	c.set(called)
	defer c.set(backendDone)
	r := &http.Request{Body: http.NoBody}
	c.served = c.backend(c, grpcWriter{ss}, r.WithContext(ss.Context()))
	return c.served
}

type grpcWriter struct{ grpc.ServerStream }

func (grpcWriter) Header() http.Header { return http.Header{} }
func (grpcWriter) WriteHeader(int)     {}
func (grpcWriter) Flush()              {}

func (w grpcWriter) Write(p []byte) (int, error) {
	return len(p), w.SendMsg(wrapperspb.String(string(p)))
}
